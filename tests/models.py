"""Small random checkpoints of each supported architecture, written as Hugging Face has them."""

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

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
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def write_model(path: Path, kind: str, *, seed: int = 0, **settings: Any) -> Path:
    """A random `kind` (a transformers model type) in BF16 with the example's tokenizer.

    `settings` are keys of its config.json. Every norm's weight is drawn too, so that none can be
    left out unnoticed.
    """
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **(_SIZES | _KINDS[kind] | settings))
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.to(torch.bfloat16).save_pretrained(path)
    for file in TOKENIZER.glob("tokenizer*"):
        shutil.copy(file, path)
    return path
