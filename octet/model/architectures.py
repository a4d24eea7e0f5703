"""Reads the fields of a `ModelSpec` from a transformers config.json, by architecture.

An absent key takes the default of that architecture's configuration class in transformers 5; a
null key takes the value that this class gives it.
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args

from octet.errors import UnsupportedError

__all__ = ["ARCHITECTURES", "Architecture", "fields_of"]

Architecture = Literal[
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "GemmaForCausalLM",
    "Phi3ForCausalLM",
    "GptOssForCausalLM",
]

# Their decoder layer is: RMSNorm, attention (RoPE, grouped queries), RMSNorm, gated MLP; the fields
# of ModelSpec describe the variants. In some or all layers, Mixtral and Qwen3-MoE have a sparse
# block instead of the MLP: a router and experts, each a gated MLP of its own. gpt-oss has one in
# every layer, with rows of gate and up in turn.
ARCHITECTURES: tuple[Architecture, ...] = get_args(Architecture)

_QWEN3 = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
_SWITCHED = ("Qwen2ForCausalLM", *_QWEN3)  # the window applies only if use_sliding_window is set
_WINDOWED = (
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Phi3ForCausalLM",
    "GptOssForCausalLM",
    *_SWITCHED,
)
# The window may apply to some layers only.
_BY_LAYER = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "GptOssForCausalLM")
# Have biases if attention_bias is set.
_BIASED = ("LlamaForCausalLM", "GemmaForCausalLM", "GptOssForCausalLM", *_QWEN3)

_COMMON: dict[str, Any] = {
    "head_dim": None,
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN: dict[str, Any] = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048},
    "MistralForCausalLM": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "MixtralForCausalLM": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
    },
    "Qwen2ForCausalLM": _QWEN,
    "Qwen3ForCausalLM": _QWEN | {"head_dim": 128},
    "Qwen3MoeForCausalLM": _QWEN | {"num_key_value_heads": 4},
    "GemmaForCausalLM": {
        "head_dim": 256,
        "num_key_value_heads": 16,
        "max_position_embeddings": 8192,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    "Phi3ForCausalLM": {
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 32000,
    },
    "GptOssForCausalLM": {
        "head_dim": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "sliding_window": 128,
        "attention_bias": True,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "bos_token_id": None,
        "eos_token_id": None,
    },
}

# What transformers 5 takes for gpt-oss if config.json has no RoPE parameters.
_GPT_OSS_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def fields_of(architecture: str, config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns the fields of a ModelSpec for a config.json (4.x or 5.x) of a known architecture.

    Raises KeyError for a missing size without a default, and UnsupportedError, naming `where`, for
    contradictory values.
    """
    given = {**_COMMON, **_DEFAULTS[architecture], **config}
    undescribed: list[str] = []
    gemma, phi3 = architecture == "GemmaForCausalLM", architecture == "Phi3ForCausalLM"
    gpt_oss = architecture == "GptOssForCausalLM"
    bias = architecture in _BIASED and bool(given.get("attention_bias"))
    fields = _sizes(given) | {
        "qk_norm": architecture in _QWEN3,
        "qkv_bias": bias or architecture == "Qwen2ForCausalLM",
        "o_bias": bias,
        "mlp_bias": gpt_oss
        or (architecture == "LlamaForCausalLM" and bool(config.get("mlp_bias"))),
        "norm_offset": 1.0 if gemma else 0.0,
        "fused_qkv": phi3,
        "fused_gate_up": phi3 or gpt_oss,
    }
    if gemma:
        fields["embedding_scale"] = float(given["hidden_size"]) ** 0.5
    fields |= _activation(gemma, given, undescribed)
    if gpt_oss:
        undescribed.append("attention sinks")
        fields["attention_sinks"] = True
        fields |= {key: given[key] for key in ("swiglu_alpha", "swiglu_limit")}
    if gpt_oss and not (given.get("rope_scaling") or given.get("rope_parameters")):
        given["rope_parameters"] = _GPT_OSS_ROPE
    fields |= _rope(given, fields["head_dim"], where, undescribed, partial=phi3, yarn=gpt_oss)
    fields |= _window(architecture, given, where, undescribed)
    fields |= _experts(architecture, given, where)
    return fields | {"undescribed": tuple(undescribed)}


def _sizes(given: Mapping[str, Any]) -> dict[str, Any]:
    hidden, heads, head_dim = given["hidden_size"], given["num_attention_heads"], given["head_dim"]
    if head_dim is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        head_dim = hidden // heads
    kv_heads, eos = given["num_key_value_heads"], given["eos_token_id"]
    return {
        "layers": given["num_hidden_layers"],
        "hidden_size": hidden,
        "intermediate_size": given["intermediate_size"],
        "heads": heads,
        "kv_heads": heads if kv_heads is None else kv_heads,
        "head_dim": head_dim,
        "vocab_size": given["vocab_size"],
        "max_positions": given["max_position_embeddings"],
        "rms_norm_eps": given["rms_norm_eps"],
        "tied_embeddings": bool(given["tie_word_embeddings"]),
        "eos_token_ids": tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        "bos_token_id": given["bos_token_id"],
    }


def _activation(gemma: bool, given: Mapping[str, Any], undescribed: list[str]) -> dict[str, Any]:
    """Returns the activation field; appends an unknown activation to `undescribed`.

    Gemma's first releases write `gelu` for its tanh form. transformers 5 reads it so, and ignores
    `hidden_activation`, by which other software chooses the form.
    """
    name, other = given["hidden_act"], given.get("hidden_activation")
    if gemma and other not in (None, "gelu_pytorch_tanh"):
        undescribed.append(f"hidden_activation '{other}'")
    if name == "gelu_pytorch_tanh" or (gemma and name == "gelu"):
        return {"activation": "gelu_tanh"}
    if name not in ("silu", "swish"):
        undescribed.append(f"hidden_act '{name}'")
    return {"activation": "silu"}


def _rope(
    given: Mapping[str, Any],
    head_dim: Any,
    where: str,
    undescribed: list[str],
    *,
    partial: bool,
    yarn: bool,
) -> dict[str, Any]:
    """Returns the RoPE fields; appends what they cannot describe to `undescribed`.

    With `partial`, a share of each head may rotate; with `yarn`, that scaling is described.
    """
    rope = given.get("rope_scaling") or given.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise UnsupportedError(f"{where}: config.json: rope_parameters is not an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    fields: dict[str, Any] = {"rope_theta": rope.get("rope_theta", given["rope_theta"])}
    factor = rope.get("partial_rotary_factor", given.get("partial_rotary_factor", 1.0))
    if not isinstance(factor, int | float) or not 0 < factor <= 1:
        raise UnsupportedError(
            f"{where}: config.json: partial_rotary_factor is {factor!r}, not above 0 and at most 1"
        )
    if partial and isinstance(head_dim, int):
        fields["rotary_dim"] = int(head_dim * factor)
    elif factor != 1.0:  # transformers does not read this key here
        undescribed.append(f"partial_rotary_factor {factor}")
    if kind == "linear":
        fields["rope_scaling"] = {"type": "linear", "factor": rope.get("factor")}
    elif kind == "llama3":
        before = given.get("original_max_position_embeddings")
        before = before or rope.get("original_max_position_embeddings")
        fields["rope_scaling"] = {
            "type": "llama3",
            "factor": rope.get("factor"),
            "low_freq_factor": rope.get("low_freq_factor"),
            "high_freq_factor": rope.get("high_freq_factor"),
            "original_max_positions": before or given["max_position_embeddings"],
        }
    elif kind == "yarn" and yarn:
        fields["rope_scaling"] = {
            "type": "yarn",
            "factor": rope.get("factor"),
            "beta_fast": rope.get("beta_fast", 32.0),
            "beta_slow": rope.get("beta_slow", 1.0),
            "truncate": rope.get("truncate", True),
            "original_max_positions": rope.get("original_max_position_embeddings"),
        }
        others = ("attention_factor", "mscale", "mscale_all_dim")
        undescribed.extend(f"{key} {rope[key]}" for key in others if rope.get(key) is not None)
    elif kind != "default":
        undescribed.append(f"rope_type '{kind}'")
    return fields


def _window(
    architecture: str, given: Mapping[str, Any], where: str, undescribed: list[str]
) -> dict[str, Any]:
    """Returns the sliding-window fields; {} if there is no window or it covers all positions."""
    layers, positions = given["num_hidden_layers"], given["max_position_embeddings"]
    window, kinds = given["sliding_window"], given.get("layer_types") or []
    if not isinstance(positions, int) or not isinstance(window, int | None):
        raise UnsupportedError(
            f"{where}: config.json: max_position_embeddings or sliding_window is no integer"
        )
    if not isinstance(kinds, list) or not isinstance(layers, int):
        raise UnsupportedError(f"{where}: config.json: layer_types or num_hidden_layers is broken")
    if architecture in _SWITCHED and not given.get("use_sliding_window"):
        window = None
    if architecture not in _WINDOWED and window is not None:
        undescribed.append(f"sliding_window {window}")
        window = None
    known = {"full_attention"} | ({"sliding_attention"} if architecture in _BY_LAYER else set())
    undescribed.extend(f"layer type '{kind}'" for kind in dict.fromkeys(kinds) if kind not in known)
    sliding = list(range(layers))
    if architecture in _BY_LAYER:
        if kinds and len(kinds) != layers:
            raise UnsupportedError(
                f"{where}: config.json: layer_types names {len(kinds)} of {layers} layers"
            )
        start = given.get("max_window_layers", 28)
        gpt_oss = architecture == "GptOssForCausalLM"  # every other layer, from the first on
        windowed = [x for x in sliding if (x % 2 == 0 if gpt_oss else x >= start)]
        kinds = kinds or [
            "sliding_attention" if x in windowed else "full_attention" for x in sliding
        ]
        sliding = [x for x in sliding if kinds[x] == "sliding_attention"]
        if sliding and window is None and given.get("layer_types"):
            raise UnsupportedError(
                f"{where}: config.json: layer_types names sliding_attention, and no window is set"
            )
    if window is None or window >= positions or not sliding:
        return {}
    return {"sliding_window": window, "sliding_layers": tuple(sliding)}


def _experts(architecture: str, config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns the fields of ModelSpec that describe sparse layers; {} for a dense architecture.

    Raises KeyError naming an absent key, and UnsupportedError for impossible values.
    """
    if architecture not in ("MixtralForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM"):
        return {}
    layers, chosen = config["num_hidden_layers"], config["num_experts_per_tok"]
    # transformers 5 writes `num_local_experts` for both; Qwen's own files have `num_experts`.
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
    same = architecture != "Qwen3MoeForCausalLM"  # one size for layers and experts
    return {
        "experts": experts,
        "experts_per_token": chosen,
        "moe_intermediate_size": config["intermediate_size" if same else "moe_intermediate_size"],
        "norm_topk_prob": same or bool(config.get("norm_topk_prob", False)),
        "sparse_layers": tuple(
            index for index in range(layers) if index not in dense and (index + 1) % step == 0
        ),
    }
