"""What Octet knows of a decoder's architecture: its sizes, its linears and who shares an input."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from octet.errors import UnsupportedError

__all__ = ["ARCHITECTURES", "Linear", "ModelSpec"]

# Architectures whose decoder layer is: RMSNorm, attention (RoPE, grouped queries), RMSNorm, SwiGLU.
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")


class Linear(BaseModel):
    """One projection of a decoder layer; weight `[out_features, in_features]`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str  # full module name, such as model.layers.0.self_attn.q_proj
    out_features: int
    in_features: int
    # Linears with the same `input` read the same tensor, and are fused by the kernels that serve
    # them: q/k/v, and gate/up. It is named after the first of them: `<first linear>.input`.
    input: str


class ModelSpec(BaseModel):
    """The sizes of a supported decoder, from its config.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    architecture: Literal["LlamaForCausalLM", "MistralForCausalLM"]
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rope_theta: float
    rms_norm_eps: float
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: str) -> Self:
        """From a transformers config.json (4.x or 5.x spelling).

        Raises UnsupportedError naming `where` and the feature for an architecture or a variant
        (RoPE scaling, sliding window, biases, another activation) that Octet does not build.
        """
        names = config.get("architectures")
        if not isinstance(names, list) or not names:
            names = ["(none)"]
        supported = ", ".join(ARCHITECTURES)
        if names[0] not in ARCHITECTURES:
            raise UnsupportedError(
                f"{where}: architecture {names[0]} is not supported; supported: {supported}"
            )
        quantized = config.get("quantization_config") is not None
        _refuse(where, "a checkpoint that is quantized already (give the original)", quantized)
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not isinstance(rope, dict):
            raise UnsupportedError(f"{where}: config.json: rope_parameters is not an object")
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        _refuse(where, f"rope_type '{rope_type}'", rope_type != "default")
        window = config.get("sliding_window")
        positions = config.get("max_position_embeddings")
        if not isinstance(positions, int) or not isinstance(window, int | None):
            raise UnsupportedError(
                f"{where}: config.json: max_position_embeddings or sliding_window is no integer"
            )
        _refuse(where, f"sliding_window {window}", window is not None and window < positions)
        _refuse(where, "attention_bias", bool(config.get("attention_bias")))
        _refuse(where, "mlp_bias", bool(config.get("mlp_bias")))
        activation = config.get("hidden_act", "silu")
        _refuse(where, f"hidden_act '{activation}'", activation != "silu")
        eos = config.get("eos_token_id")
        eos_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
        try:
            return cls(
                architecture=names[0],
                layers=config["num_hidden_layers"],
                hidden_size=config["hidden_size"],
                intermediate_size=config["intermediate_size"],
                heads=config["num_attention_heads"],
                kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
                head_dim=config.get("head_dim")
                or config["hidden_size"] // config["num_attention_heads"],
                vocab_size=config["vocab_size"],
                max_positions=positions,
                rope_theta=rope.get("rope_theta", config.get("rope_theta", 10_000.0)),
                rms_norm_eps=config["rms_norm_eps"],
                tied_embeddings=bool(config.get("tie_word_embeddings", False)),
                eos_token_ids=tuple(eos_ids),
                bos_token_id=config.get("bos_token_id"),
            )
        except KeyError as error:
            raise UnsupportedError(f"{where}: config.json lacks {error}") from None
        except ValidationError as error:
            first = error.errors()[0]
            raise UnsupportedError(
                f"{where}: config.json: {first['loc'][0]}: {first['msg']}"
            ) from None

    def layer(self, index: int) -> str:
        """The module name of decoder layer `index`."""
        return f"model.layers.{index}"

    def linears(self) -> Iterator[Linear]:
        """Every projection of every decoder layer, in execution order."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        hidden, inner = self.hidden_size, self.intermediate_size
        for index in range(self.layers):
            attention, mlp = f"{self.layer(index)}.self_attn", f"{self.layer(index)}.mlp"
            for name, out, into, first in (
                (f"{attention}.q_proj", q, hidden, f"{attention}.q_proj"),
                (f"{attention}.k_proj", kv, hidden, f"{attention}.q_proj"),
                (f"{attention}.v_proj", kv, hidden, f"{attention}.q_proj"),
                (f"{attention}.o_proj", hidden, q, f"{attention}.o_proj"),
                (f"{mlp}.gate_proj", inner, hidden, f"{mlp}.gate_proj"),
                (f"{mlp}.up_proj", inner, hidden, f"{mlp}.gate_proj"),
                (f"{mlp}.down_proj", hidden, inner, f"{mlp}.down_proj"),
            ):
                yield Linear(name=name, out_features=out, in_features=into, input=f"{first}.input")

    def tensor_names(self) -> Iterator[str]:
        """Every tensor of the model, without the head of tied embeddings."""
        yield "model.embed_tokens.weight"
        yield "model.norm.weight"
        for index in range(self.layers):
            yield f"{self.layer(index)}.input_layernorm.weight"
            yield f"{self.layer(index)}.post_attention_layernorm.weight"
        for linear in self.linears():
            yield f"{linear.name}.weight"


def _refuse(where: str, feature: str, present: bool) -> None:
    if present:
        raise UnsupportedError(f"{where}: {feature} is not supported")
