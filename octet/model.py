"""What Octet knows of a decoder's architecture: its sizes, its linears and who shares an input."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from octet.errors import UnsupportedError

__all__ = ["ARCHITECTURES", "EXPORTED", "Linear", "ModelSpec", "RopeScaling"]

Architecture = Literal[
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
]

# Their decoder layer is: RMSNorm, attention (RoPE, grouped queries), RMSNorm, SwiGLU. Qwen3 adds a
# norm of each query and key head before RoPE. Mixtral and Qwen3-MoE have, in some or all layers, a
# sparse block instead of the SwiGLU: a router and experts, each a SwiGLU of its own.
ARCHITECTURES: tuple[Architecture, ...] = get_args(Architecture)

# Those that exports write; the others can be calibrated, measured and reported.
EXPORTED: tuple[Architecture, ...] = ("LlamaForCausalLM", "MistralForCausalLM")

_QWEN3 = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")


class Linear(BaseModel):
    """One projection of a decoder layer; weight `[out_features, in_features]`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str  # full module name, such as model.layers.0.self_attn.q_proj
    out_features: int
    in_features: int
    # Linears with the same `input` read the same tensor, and are fused by the kernels that serve
    # them: q/k/v, and gate/up. It is named after the first of them: `<first linear>.input`.
    input: str


class RopeScaling(BaseModel):
    """How RoPE's inverse frequencies are changed; see transformers' modeling_rope_utils.

    `linear` divides every one by `factor`. `llama3` divides those of wavelengths over
    original_max_positions / low_freq_factor, leaves those under original_max_positions /
    high_freq_factor, and blends between; its last three fields are given then, and only then.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: Literal["llama3", "linear"]
    factor: float
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_positions: int | None = None


class ModelSpec(BaseModel):
    """The sizes of a supported decoder, from its config.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    architecture: str
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
    activation: Literal["silu", "gelu_tanh"] = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    norm_offset: float = 0.0  # Gemma's RMSNorm multiplies by 1 + weight
    embedding_scale: float = 1.0  # Gemma: sqrt(hidden_size)
    rotary_dim: int  # of each head, the first so many values turn; head_dim unless given
    rope_scaling: RopeScaling | None = None
    # A token of `sliding_layers` sees itself and the sliding_window - 1 tokens before it.
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    fused_qkv: bool = False  # one self_attn.qkv_proj: rows of q, then of k, then of v
    fused_gate_up: bool = False  # one mlp.gate_up_proj: rows of gate, then of up
    # An architecture that Octet does not know: the linears are those of the checkpoint's tensors,
    # and the fields above say nothing of what is computed between them.
    generic: bool = False
    # What config.json asks for that no field describes, such as "rope_type 'longrope'": a reason
    # to refuse for whoever computes the model from this object.
    undescribed: tuple[str, ...] = ()
    qk_norm: bool = False  # an RMSNorm of each query and key head, [head_dim], before RoPE
    # Of a mixture of experts; `intermediate_size` is then that of the layers that are not sparse.
    experts: int = 0
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False  # whether the chosen experts' probabilities are made to sum to 1
    sparse_layers: tuple[int, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _rotary_dim(cls, values: Any) -> Any:
        if isinstance(values, dict) and "head_dim" in values:
            return {"rotary_dim": values["head_dim"], **values}
        return values

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: str) -> Self:
        """From a transformers config.json (4.x or 5.x spelling).

        Raises UnsupportedError naming `where` and the feature for an architecture or a variant
        (RoPE scaling, sliding window, biases, another activation) that Octet does not build. A key
        that may be absent takes the default of that architecture's transformers configuration.
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
        if names[0] in _QWEN3:  # these alone have a switch for it, which is off by default
            window = window if config.get("use_sliding_window") else None
        _refuse(where, f"sliding_window {window}", window is not None and window < positions)
        kinds = config.get("layer_types") or []
        for kind in kinds if isinstance(kinds, list) else [kinds]:
            _refuse(where, f"layer type '{kind}'", kind != "full_attention")
        _refuse(where, "attention_bias", bool(config.get("attention_bias")))
        _refuse(where, "mlp_bias", bool(config.get("mlp_bias")))
        activation = config.get("hidden_act", "silu")
        _refuse(where, f"hidden_act '{activation}'", activation != "silu")
        eos = config.get("eos_token_id")
        eos_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
        try:
            head_dim, theta = _defaults(names[0], config)
            return cls(
                architecture=names[0],
                layers=config["num_hidden_layers"],
                hidden_size=config["hidden_size"],
                intermediate_size=config["intermediate_size"],
                heads=config["num_attention_heads"],
                kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
                head_dim=head_dim,
                vocab_size=config["vocab_size"],
                max_positions=positions,
                rope_theta=rope.get("rope_theta", config.get("rope_theta", theta)),
                rms_norm_eps=config["rms_norm_eps"],
                tied_embeddings=bool(config.get("tie_word_embeddings", False)),
                eos_token_ids=tuple(eos_ids),
                bos_token_id=config.get("bos_token_id"),
                qk_norm=names[0] in _QWEN3,
                **_experts(names[0], config, where),
            )
        except KeyError as error:
            raise UnsupportedError(f"{where}: config.json lacks {error}") from None
        except ValidationError as error:
            first = error.errors()[0]
            raise UnsupportedError(
                f"{where}: config.json: {first['loc'][0]}: {first['msg']}"
            ) from None

    def unexportable(self) -> str | None:
        """Why no export writes such a model yet, as a clause; None if one does."""
        if self.architecture in EXPORTED:
            return None
        return (
            f"exports are for {' and '.join(EXPORTED)}; {self.architecture} can be calibrated only"
        )

    def layer(self, index: int) -> str:
        """The module name of decoder layer `index`."""
        return f"model.layers.{index}"

    def experts_of(self, layer: str) -> str:
        """The module name, in the checkpoint, of the experts of the sparse layer of that name."""
        block = "block_sparse_moe" if self.architecture == "MixtralForCausalLM" else "mlp"
        return f"{layer}.{block}.experts"

    @property
    def expert_projections(self) -> tuple[str, str, str]:
        """The names, in the checkpoint, of an expert's gate, up and down projections."""
        if self.architecture == "MixtralForCausalLM":
            return "w1", "w3", "w2"
        return "gate_proj", "up_proj", "down_proj"

    def linears(self, layer: int | None = None) -> Iterator[Linear]:
        """Every projection of decoder layer `layer`, or of all, in execution order.

        A router is none of them: it is never quantized.
        """
        for index in range(self.layers) if layer is None else (layer,):
            yield from self._attention(f"{self.layer(index)}.self_attn")
            if index not in self.sparse_layers:
                names = ("gate_proj", "up_proj", "down_proj")
                yield from self._swiglu(f"{self.layer(index)}.mlp", names, self.intermediate_size)
                continue
            for expert in range(self.experts):
                yield from self._swiglu(
                    f"{self.experts_of(self.layer(index))}.{expert}",
                    self.expert_projections,
                    self.moe_intermediate_size,
                )

    def tensor_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The name and shape of every tensor of the model, without the head of tied embeddings."""
        for linear in self.linears():
            yield f"{linear.name}.weight", (linear.out_features, linear.in_features)
        for index in range(self.layers):
            layer = self.layer(index)
            yield f"{layer}.input_layernorm.weight", (self.hidden_size,)
            yield f"{layer}.post_attention_layernorm.weight", (self.hidden_size,)
            if self.qk_norm:
                yield f"{layer}.self_attn.q_norm.weight", (self.head_dim,)
                yield f"{layer}.self_attn.k_norm.weight", (self.head_dim,)
            if index in self.sparse_layers:
                router = self.experts_of(layer).removesuffix(".experts") + ".gate"
                yield f"{router}.weight", (self.experts, self.hidden_size)
        yield "model.norm.weight", (self.hidden_size,)
        yield "model.embed_tokens.weight", (self.vocab_size, self.hidden_size)
        if not self.tied_embeddings:
            yield "lm_head.weight", (self.vocab_size, self.hidden_size)

    def _attention(self, name: str) -> Iterator[Linear]:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for projection, out in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            yield _linear(f"{name}.{projection}", out, self.hidden_size, f"{name}.q_proj")
        yield _linear(f"{name}.o_proj", self.hidden_size, q, f"{name}.o_proj")

    def _swiglu(self, name: str, projections: Sequence[str], inner: int) -> Iterator[Linear]:
        gate, up, down = (f"{name}.{projection}" for projection in projections)
        yield _linear(gate, inner, self.hidden_size, gate)
        yield _linear(up, inner, self.hidden_size, gate)
        yield _linear(down, self.hidden_size, inner, down)


def _linear(name: str, out: int, into: int, first: str) -> Linear:
    return Linear(name=name, out_features=out, in_features=into, input=f"{first}.input")


def _defaults(architecture: str, config: Mapping[str, Any]) -> tuple[Any, float]:
    """The head size, and the RoPE base of a config.json that gives none."""
    head_dim = config.get("head_dim", 128 if architecture == "Qwen3ForCausalLM" else None)
    if head_dim is None:
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        if isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
            head_dim = hidden // heads
    return head_dim, 1_000_000.0 if architecture == "MixtralForCausalLM" else 10_000.0


def _experts(architecture: str, config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of ModelSpec that say which layers are sparse and of what; {} for a dense one.

    Raises KeyError naming an absent key and UnsupportedError for what cannot be.
    """
    if architecture not in ("MixtralForCausalLM", "Qwen3MoeForCausalLM"):
        return {}
    layers, chosen = config["num_hidden_layers"], config["num_experts_per_tok"]
    # transformers 5 writes `num_local_experts` for both; Qwen's own files say `num_experts`.
    experts = config.get("num_local_experts", config.get("num_experts"))
    step: Any = 1
    dense: Any = []
    if architecture == "Qwen3MoeForCausalLM":
        step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    numbers = {"num_hidden_layers": layers, "num_experts_per_tok": chosen}
    numbers |= {"num_experts": experts, "decoder_sparse_step": step}
    for key, value in numbers.items():
        if not isinstance(value, int) or value < 1:
            raise UnsupportedError(f"{where}: config.json: {key} is {value!r}, not a count")
    if chosen > experts:
        raise UnsupportedError(
            f"{where}: config.json: num_experts_per_tok {chosen} of {experts} experts"
        )
    if not isinstance(dense, list):
        raise UnsupportedError(f"{where}: config.json: mlp_only_layers is not a list")
    mixtral = architecture == "MixtralForCausalLM"
    return {
        "experts": experts,
        "experts_per_token": chosen,
        "moe_intermediate_size": config[
            "intermediate_size" if mixtral else "moe_intermediate_size"
        ],
        "norm_topk_prob": mixtral or bool(config.get("norm_topk_prob", False)),
        "sparse_layers": tuple(
            index for index in range(layers) if index not in dense and (index + 1) % step == 0
        ),
    }


def _refuse(where: str, feature: str, present: bool) -> None:
    if present:
        raise UnsupportedError(f"{where}: {feature} is not supported")
