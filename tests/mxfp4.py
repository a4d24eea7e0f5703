"""Packs the experts of a gpt-oss checkpoint in MXFP4 as OpenAI publishes them, with torch alone."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

__all__ = ["MXFP4", "pack_experts", "unpacked"]

# Of openai/gpt-oss-20b's config.json.
MXFP4: dict[str, Any] = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_PROJECTIONS = ("gate_up_proj", "down_proj")


def pack_experts(model: Path, out: Path) -> Path:
    """Writes `model`, a gpt-oss in BF16, with its experts in MXFP4 to `out`."""
    shutil.copytree(model, out)
    written: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        if name.endswith(_PROJECTIONS):
            blocks, scales = _pack(tensor.float().transpose(1, 2))
            written |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        else:
            written[name] = tensor
    save_file(written, out / "model.safetensors", {"format": "pt"})
    config = json.loads((out / "config.json").read_text("utf-8"))
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": MXFP4}))
    return out


def unpacked(packed: Path, out: Path) -> Path:
    """Writes the BF16 model that transformers makes of the MXFP4 checkpoint `packed` to `out`."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    shutil.copytree(packed, out)
    tensors = load_file(packed / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_blocks")]:
        blocks, scales = (
            tensors.pop(f"{name[: -len('_blocks')]}{x}") for x in ("_blocks", "_scales")
        )
        tensors[name.removesuffix("_blocks")] = convert_moe_packed_tensors(blocks, scales)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    config = json.loads((out / "config.json").read_text("utf-8"))
    del config["quantization_config"]
    (out / "config.json").write_text(json.dumps(config))
    return out


def _pack(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns blocks uint8 [E, N, K/32, 16] and scales uint8 [E, N, K/32] of `weight` [E, N, K]."""
    groups = weight.unflatten(-1, (-1, 32))
    largest = groups.abs().amax(-1, keepdim=True).clamp(min=2.0**-100)
    exponent = (largest.log2().floor() - 2).clamp(-127, 125)
    scaled = groups / 2.0**exponent
    codes = (scaled.abs()[..., None] - _VALUES).abs().argmin(-1) + 8 * (scaled < 0)
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    return blocks.to(torch.uint8), (exponent[..., 0] + 127).to(torch.uint8)
