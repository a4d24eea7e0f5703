"""One projection of a decoder layer."""

from pydantic import BaseModel, ConfigDict

__all__ = ["Linear"]


class Linear(BaseModel):
    """One projection of a decoder layer; weight `[out_features, in_features]`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str  # full module name, such as model.layers.0.self_attn.q_proj
    out_features: int
    in_features: int
    # Linears with the same `input` read the same tensor, and are fused by the kernels that serve
    # them: q/k/v, and gate/up. It is named after the first of them: `<first linear>.input`.
    input: str
