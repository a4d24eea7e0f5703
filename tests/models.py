"""Small random checkpoints of each supported architecture, written as Hugging Face has them."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from octet.storage.tensors import Tensor, TensorFile, write_tensors

TOKENIZER = Path(__file__).parent.parent / "examples" / "python-lm" / "model"

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # not hidden_size / heads: a mistake there shows
    "vocab_size": 4096,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 0,
    "initializer_range": 0.1,
}
_KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 24,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
    "gemma": {"num_key_value_heads": 1},
    # Phi-4-mini's rotary share; a Phi-3 configuration has no head_dim
    "phi3": {
        "head_dim": 16,
        "pad_token_id": None,
        "rope_parameters": {"rope_theta": 10_000.0, "partial_rotary_factor": 0.75},
    },
    # Architectures that Octet does not know.
    "gemma2": {"sliding_window": 24, "query_pre_attn_scalar": 32},
    "gemma3_text": {"sliding_window": 24, "query_pre_attn_scalar": 32},
    "olmo2": {},
    "olmo": {},  # norms without weights
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5},
    "stablelm": {"head_dim": 16, "use_qkv_bias": True, "partial_rotary_factor": 0.25},
    "phi": {"head_dim": 16, "partial_rotary_factor": 0.5},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "pad_token_id": None},
    "qwen2_moe": {  # every other layer sparse, with an expert that all tokens go to
        "head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 32,
        "decoder_sparse_step": 2,
    },
}

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# Name -> what `write_model` takes: a model of each architecture that Octet knows, and of each
# variant of one. The windows are shorter than most samples.
KNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama3-rope": ("llama", {"rope_parameters": _LLAMA3}),
    "linear-rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}},
    ),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {}),
    "mistral-window": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
    "gemma": ("gemma", {}),
    "phi3": ("phi3", {}),
    "phi3-window": ("phi3", {"sliding_window": 24}),
    "qwen3_moe": ("qwen3_moe", {}),
    "mixtral": ("mixtral", {}),
}
# Not quantized by Octet: run, simulated and proven only.
GPT_OSS: dict[str, tuple[str, dict[str, Any]]] = {"gpt_oss": ("gpt_oss", {})}
# What no field of a ModelSpec describes: transformers computes it, no graph of ours does.
UNDESCRIBED: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3-longrope": (
        "phi3",
        {
            "max_position_embeddings": 8192,
            "original_max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
                "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
            },
        },
    ),
    "llama-yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "llama-gelu": ("llama", {"hidden_act": "gelu"}),
}
GENERIC: dict[str, tuple[str, dict[str, Any]]] = {
    kind: (kind, {})
    for kind in (
        *("gemma2", "gemma3_text", "olmo", "olmo2", "granite", "stablelm", "phi"),
        *("olmoe", "qwen2_moe"),
    )
}


def write_model(path: Path, kind: str, *, seed: int = 0, **settings: Any) -> Path:
    """A random `kind` (a transformers model type) in BF16 with the example's tokenizer.

    `settings` are keys of its config.json. Every norm's weight and every bias is drawn too, so that
    none can be left out unnoticed.
    """
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **(_SIZES | _KINDS.get(kind, {}) | settings))
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", ".sinks")):
            torch.nn.init.uniform_(parameter, -0.5, 0.5)
        elif "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.to(torch.bfloat16).save_pretrained(path)
    for file in TOKENIZER.glob("tokenizer*"):
        shutil.copy(file, path)
    return path


Tensors = dict[str, Tensor]


def rewrite_model(
    source: Path, out: Path, change: Callable[[Tensors], Tensors] = dict, **config: Any
) -> Path:
    """A copy of a checkpoint whose tensors `change` has changed, shard by shard.

    `config` are keys of its config.json that get other values.
    """
    shutil.copytree(source, out, dirs_exist_ok=True)
    for path in source.glob("*.safetensors"):
        file = TensorFile.open(path)
        tensors = change({name: file.read(name) for name in file.names})
        write_tensors(out / path.name, tensors, {"format": "pt"})
    before = json.loads((source / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(before | config))
    return out


def scale_tensors(source: Path, out: Path, powers: Mapping[str, int]) -> Path:
    """A copy of a checkpoint whose tensors are multiplied by powers of two.

    `powers` are by parts of their names, such as "1.self_attn.k_proj" for weight and bias.
    """

    def change(tensors: Tensors) -> Tensors:
        found = [
            (name, power) for name in tensors for part, power in powers.items() if part in name
        ]
        return tensors | {name: tensors[name].times_power(power) for name, power in found}

    return rewrite_model(source, out, change)
