"""Describes a decoder's architecture: its sizes, its linears and which of them share an input."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from octet.errors import CheckpointError, UnsupportedError
from octet.model.architectures import ARCHITECTURES, fields_of
from octet.model.block_format import block_format
from octet.model.generic import Linear, generic_fields
from octet.model.unsupported import quantization_of, unsupported_feature

__all__ = [
    "ARCHITECTURES",
    "Linear",
    "ModelSpec",
    "RopeScaling",
    "quantized_already",
    "refuse_more_than_stored",
    "refuse_unsupported",
]


Count: TypeAlias = Annotated[int, Field(gt=0)]

# Limits of what a config.json or a manifest may claim, an order of magnitude over any known model.
_MOST_POSITIONS = 1 << 27
_MOST_EXPERTS = 200_000  # of all layers together
_FEW = 10_000  # layers and experts that cost nothing, whether or not they are stored


class RopeScaling(BaseModel):
    """The scaling of RoPE's inverse frequencies; see transformers' modeling_rope_utils.

    `linear` divides all of them by `factor`. `llama3` divides those of wavelengths over
    original_max_positions / low_freq_factor, keeps those under original_max_positions /
    high_freq_factor, and blends in between; only it has the two factors. `yarn` divides those that
    turn fewer than `beta_slow` times in original_max_positions, keeps those that turn more than
    `beta_fast` times, and scales attention by the square of 0.1 ln(factor) + 1.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    type: Literal["llama3", "linear", "yarn"]
    factor: float
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_positions: int | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    truncate: bool | None = None  # of yarn: whether the bounds of the blend are whole dimensions


class ModelSpec(BaseModel):
    """The sizes of a decoder, from its config.json."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    architecture: str
    layers: Count
    hidden_size: Count
    intermediate_size: Annotated[int, Field(ge=0)]
    heads: Count
    kv_heads: Count
    head_dim: Count
    vocab_size: Count
    max_positions: Annotated[int, Field(gt=0, le=_MOST_POSITIONS)]
    rope_theta: float
    rms_norm_eps: float
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    activation: Literal["silu", "gelu_tanh"] = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    norm_offset: float = 0.0  # Gemma's RMSNorm multiplies by 1 + weight
    embedding_scale: float = 1.0  # Gemma: sqrt(hidden_size)
    rotary_dim: int  # the first `rotary_dim` values of each head rotate; default: head_dim
    rope_scaling: RopeScaling | None = None
    # A token of `sliding_layers` sees itself and the sliding_window - 1 tokens before it.
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    fused_qkv: bool = False  # one self_attn.qkv_proj: rows of q, then of k, then of v
    # One gate_up_proj: rows of gate, then of up; in gpt-oss, one of gate and one of up in turn.
    fused_gate_up: bool = False
    # An architecture that Octet does not know: the linears are taken from the checkpoint's tensors,
    # and the fields above do not describe the computation between them.
    generic: bool = False
    prefix: str = "model.layers"  # of the decoder layers
    found: tuple[Linear, ...] = ()  # the linears, if `generic`
    # Features in config.json that no field describes, such as "rope_type 'longrope'". Code that
    # computes the model from this object has to refuse them.
    undescribed: tuple[str, ...] = ()
    attention_sinks: bool = False  # a tensor [heads]: a further logit in attention's softmax
    # gpt-oss: gate <= limit, |up| <= limit, (up + 1) * gate * sigmoid(alpha * gate)
    swiglu_alpha: float | None = None
    swiglu_limit: float | None = None
    qk_norm: bool = False  # an RMSNorm of each query and key head, [head_dim], before RoPE
    # For a mixture of experts; `intermediate_size` is then that of the dense layers.
    experts: int = 0
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False  # normalize the chosen experts' probabilities to sum to 1
    sparse_layers: tuple[int, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _rotary_dim(cls, values: Any) -> Any:
        if isinstance(values, dict) and "head_dim" in values:
            return {"rotary_dim": values["head_dim"], **values}
        return values

    @model_validator(mode="after")
    def _plausible(self) -> Self:
        if self.layers * max(1, self.experts) > _MOST_EXPERTS:
            raise ValueError(f"{self.layers} layers of {self.experts} experts are too many")
        return self

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        where: str,
        tensors: Mapping[str, tuple[int, ...]] | None = None,
    ) -> Self:
        """Builds the spec from a transformers config.json (4.x or 5.x spelling).

        `tensors` are the checkpoint's shapes by name; an unknown architecture's linears are found
        in them. Raises UnsupportedError, naming `where`, if the config is not of a decoder-only
        model, or impossible. Features that the fields cannot describe are in `undescribed`.
        """
        architecture = refuse_unsupported(config, where)
        known = architecture in ARCHITECTURES
        if not known and tensors is None:
            raise UnsupportedError(
                f"{where}: architecture {architecture} is not supported; supported:"
                f" {', '.join(ARCHITECTURES)}, and others named ...ForCausalLM by their tensors"
            )
        if tensors is not None:
            refuse_more_than_stored(config, len(tensors), where)
        try:
            if known:
                return cls(architecture=architecture, **fields_of(architecture, config, where))
            return cls(architecture=architecture, **generic_fields(config, tensors or {}, where))
        except KeyError as error:
            raise UnsupportedError(f"{where}: config.json lacks {error}") from None
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "sizes"
            raise UnsupportedError(f"{where}: config.json: {place}: {first['msg']}") from None
        except (ArithmeticError, TypeError, ValueError) as error:  # a value of another kind
            raise UnsupportedError(f"{where}: config.json has impossible sizes ({error})") from None

    def layer(self, index: int) -> str:
        """Returns the module name of decoder layer `index`."""
        return f"{self.prefix}.{index}"

    def experts_of(self, layer: str) -> str:
        """Returns the checkpoint's module name for the experts of the sparse layer `layer`."""
        block = "block_sparse_moe" if self.architecture == "MixtralForCausalLM" else "mlp"
        return f"{layer}.{block}.experts"

    @property
    def expert_projections(self) -> tuple[str, ...]:
        """The names, in the checkpoint, of an expert's gate, up and down projections.

        Of gate_up and down projections if gate and up are fused.
        """
        if self.fused_gate_up:
            return "gate_up_proj", "down_proj"
        if self.architecture == "MixtralForCausalLM":
            return "w1", "w3", "w2"
        return "gate_proj", "up_proj", "down_proj"

    @property
    def linear_names(self) -> list[str]:
        """Names of all linears, in the order of `linears`."""
        return [linear.name for linear in self.linears()]

    def linears(self, layer: int | None = None) -> Iterator[Linear]:
        """Yields every projection of decoder layer `layer`, or of all, in execution order.

        Excludes routers, which are never quantized.
        """
        if self.generic:
            below = f"{self.prefix}." if layer is None else f"{self.layer(layer)}."
            yield from (linear for linear in self.found if linear.name.startswith(below))
            return
        for index in range(self.layers) if layer is None else (layer,):
            yield from self._attention(f"{self.layer(index)}.self_attn")
            if index not in self.sparse_layers:
                names = ("gate_proj", "up_proj", "down_proj")
                yield from self._mlp(f"{self.layer(index)}.mlp", names, self.intermediate_size)
                continue
            for expert in range(self.experts):
                yield from self._mlp(
                    f"{self.experts_of(self.layer(index))}.{expert}",
                    self.expert_projections,
                    self.moe_intermediate_size,
                )

    def tensor_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields the name and shape of every tensor of the model, except a tied head.

        For an unknown architecture, only of its linears' weights.
        """
        for linear in self.linears():
            yield f"{linear.name}.weight", (linear.out_features, linear.in_features)
            if self.has_bias(linear):
                yield f"{linear.name}.bias", (linear.out_features,)
        if self.generic:
            return
        for index in range(self.layers):
            layer = self.layer(index)
            yield f"{layer}.input_layernorm.weight", (self.hidden_size,)
            yield f"{layer}.post_attention_layernorm.weight", (self.hidden_size,)
            if self.qk_norm:
                yield f"{layer}.self_attn.q_norm.weight", (self.head_dim,)
                yield f"{layer}.self_attn.k_norm.weight", (self.head_dim,)
            if self.attention_sinks:
                yield f"{layer}.self_attn.sinks", (self.heads,)
            if index in self.sparse_layers:
                gpt_oss = self.architecture == "GptOssForCausalLM"
                block = self.experts_of(layer).removesuffix(".experts")
                router = f"{block}.{'router' if gpt_oss else 'gate'}"
                yield f"{router}.weight", (self.experts, self.hidden_size)
                if gpt_oss:
                    yield f"{router}.bias", (self.experts,)
        yield "model.norm.weight", (self.hidden_size,)
        yield "model.embed_tokens.weight", (self.vocab_size, self.hidden_size)
        if not self.tied_embeddings:
            yield "lm_head.weight", (self.vocab_size, self.hidden_size)

    def has_bias(self, linear: Linear) -> bool:
        block, _, projection = linear.name.rpartition(".")
        if block.endswith(".self_attn"):
            return self.o_bias if projection == "o_proj" else self.qkv_bias
        return self.mlp_bias

    def _attention(self, name: str) -> Iterator[Linear]:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        if self.fused_qkv:
            yield _linear(f"{name}.qkv_proj", q + 2 * kv, self.hidden_size, f"{name}.qkv_proj")
        else:
            for projection, out in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
                yield _linear(f"{name}.{projection}", out, self.hidden_size, f"{name}.q_proj")
        yield _linear(f"{name}.o_proj", self.hidden_size, q, f"{name}.o_proj")

    def _mlp(self, name: str, projections: Sequence[str], inner: int) -> Iterator[Linear]:
        gate, up, down = (f"{name}.{projections[at]}" for at in (0, -2, -1))
        if self.fused_gate_up:
            fused = f"{name}.gate_up_proj"
            yield _linear(fused, 2 * inner, self.hidden_size, fused)
        else:
            yield _linear(gate, inner, self.hidden_size, gate)
            yield _linear(up, inner, self.hidden_size, gate)
        yield _linear(down, self.hidden_size, inner, down)


def refuse_more_than_stored(config: Mapping[str, Any], tensors: int, where: str) -> None:
    """Raises CheckpointError if config.json claims far more layers or experts than `tensors`.

    Called before anything is made for each of them: a damaged file may claim a hundred million.
    """
    claimed = {"num_hidden_layers": config.get("num_hidden_layers")}
    if _architecture(config) in ARCHITECTURES:
        key = "num_local_experts" if "num_local_experts" in config else "num_experts"
        claimed[key] = config.get(key)
    counts = {key: n for key, n in claimed.items() if isinstance(n, int) and n > 1}
    if math.prod(counts.values()) > max(_FEW, 3 * tensors):
        claims = ", ".join(f"{key} {n}" for key, n in counts.items())
        raise CheckpointError(
            f"{where}: config.json claims {claims}, and the weights have {tensors} tensors in all;"
            " download both again"
        )


def refuse_unsupported(config: Mapping[str, Any], where: str) -> str:
    """Returns the architecture; raises UnsupportedError for what config.json alone rules out."""
    architecture = _architecture(config)
    feature = unsupported_feature(architecture, config)
    if architecture not in ARCHITECTURES and feature is not None:
        raise UnsupportedError(f"{where}: {architecture} {feature}")
    method = quantization_of(config)
    mxfp4 = architecture == "GptOssForCausalLM" and method == "mxfp4"
    if method is not None and block_format(config) is None and not mxfp4:
        raise UnsupportedError(quantized_already(where, method))
    if architecture not in ARCHITECTURES and not architecture.endswith("ForCausalLM"):
        raise UnsupportedError(
            f"{where}: architecture {architecture} is not supported; supported:"
            f" {', '.join(ARCHITECTURES)}, and others named ...ForCausalLM by their tensors"
        )
    return architecture


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else "(none)"


def quantized_already(where: str, method: str) -> str:
    """Returns the error for a checkpoint that `method` has quantized."""
    return (
        f"{where}: quantized already, with {method}: Octet quantizes the original, so give that"
        " (BF16, FP16 or FP32); to serve this one as it is, start vLLM on it"
    )


def _linear(name: str, out: int, into: int, first: str) -> Linear:
    return Linear(name=name, out_features=out, in_features=into, input=f"{first}.input")
