"""Names, from config.json alone, why a model cannot be calibrated: before any file is opened.

Each reason is the feature that stops Octet, not the check that it would fail later.
"""

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["quantization_of", "unsupported_feature"]

# What a head other than a language model's ends the architecture's name with.
_HEADS = {
    "ForSequenceClassification": "classifies texts",
    "ForTokenClassification": "classifies tokens",
    "ForQuestionAnswering": "marks answers in a text",
    "ForMultipleChoice": "chooses between texts",
    "ForMaskedLM": "fills gaps in a text",
    "ForRewardModel": "scores texts",
    "RewardModel": "scores texts",
}
_MULTIMODAL = ("vision_config", "audio_config", "text_config", "thinker_config")
# Architectures whose decoder layers are not <prefix>.layers.<i> with a self_attn, by model_type.
_ELSEWHERE = {
    **dict.fromkeys(
        ("bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gptj"), "transformer.h"
    ),
    **dict.fromkeys(("dbrx", "mpt"), "transformer.blocks"),
    "gpt_neox": "gpt_neox.layers.<i>.attention",
    "opt": "model.decoder.layers",
}
_LATENT = ("kv_lora_rank", "q_lora_rank", "o_lora_rank")
_RECURRENT = ("mamba", "rwkv", "xlstm", "recurrent_gemma")  # beginnings of model_type, or in it
_STATE = (  # keys of state-space, linear-attention and convolution layers
    *("state_size", "ssm_state_size", "mamba_d_state", "mamba_d_ssm", "conv1d_width"),
    *("linear_num_key_heads", "linear_num_heads", "linear_attn_alpha_factor", "conv_L_cache"),
)
_LAYER_KINDS = ("layer_types", "layers_block_type", "block_types", "attn_type_list")
_ATTENTION = ("attention", "full_attention", "sliding_attention")


def unsupported_feature(architecture: str, config: Mapping[str, Any]) -> str | None:
    """Returns what stops Octet, to follow the architecture's name; None if config.json is fine."""
    kind = str(config.get("model_type"))
    for ending, task in _HEADS.items():
        if architecture.endswith(ending):
            return f"{task} and generates none: give the ...ForCausalLM checkpoint"
    if config.get("is_encoder_decoder"):
        return "has an encoder and a decoder: Octet takes models of a decoder alone"
    other = next((key for key in _MULTIMODAL if isinstance(config.get(key), dict)), None)
    if other is not None or architecture.endswith("ForConditionalGeneration"):
        return (
            f"reads more than text ({other or architecture}): save its language model as a"
            " ...ForCausalLM checkpoint, and give that"
        )
    latent = next((key for key in _LATENT if config.get(key)), None)
    if latent is not None:
        return (
            f"has multi-head latent attention ({latent} {config[latent]}), whose cache holds no"
            " keys and values: Octet takes models that cache those"
        )
    if (state := _state_layers(kind, config)) is not None:
        return (
            f"has state-space, linear-attention or convolution layers ({state}): Octet takes models"
            " of attention layers"
        )
    if kind in _ELSEWHERE:
        return (
            f"keeps its decoder layers in {_ELSEWHERE[kind]}: Octet takes models with"
            " model.layers.<i>.self_attn, as Llama has them"
        )
    return None


def _state_layers(kind: str, config: Mapping[str, Any]) -> str | None:
    """Returns what shows that some layers are not attention."""
    if any(name in kind for name in _RECURRENT):
        return f"model_type {kind}"
    for key in _LAYER_KINDS:
        kinds = config.get(key)
        if isinstance(kinds, Sequence) and kinds and all(isinstance(x, str) for x in kinds):
            # Chunks, sparse attention and the like are named where the layers are checked.
            others = (x for x in kinds if x not in _ATTENTION and not x.endswith("_attention"))
            other = "linear_attention" if "linear_attention" in kinds else next(others, None)
            return None if other is None else f"{key}: {other}"
    return next((f"{key} {config[key]}" for key in _STATE if config.get(key) is not None), None)


def quantization_of(config: Mapping[str, Any]) -> str | None:
    """Returns the method that quantized a checkpoint, such as "gptq (4 bits)"; None if none did."""
    section = config.get("quantization_config", config.get("compression_config"))
    if section is None:
        return None
    if not isinstance(section, dict):
        return "an unnamed method"
    method = section.get("quant_method") or section.get("quant_algo") or "an unnamed method"
    if section.get("load_in_4bit") or section.get("load_in_8bit"):
        return f"bitsandbytes ({4 if section.get('load_in_4bit') else 8} bits)"
    detail = section.get("quant_algo") or section.get("format") or section.get("fmt")
    bits = section.get("bits") or section.get("w_bit")
    detail = f"{bits} bits" if bits is not None else detail
    return f"{method} ({detail})" if detail not in (None, method) else str(method)
