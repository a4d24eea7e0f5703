"""Writes a small gpt-oss, and packs its experts in MXFP4 as OpenAI publishes them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

from octet.storage.tensors import Tensor
from tests.models import Tensors, rewrite_model, write_model

__all__ = ["MXFP4", "each", "pack_experts", "unpacked", "write_gpt_oss"]

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
Codes = npt.NDArray[Any]
_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_PROJECTIONS = ("gate_up_proj", "down_proj")


def write_gpt_oss(out: Path) -> Path:
    """A random gpt-oss in BF16, of a short context, so that its golden prompts are short, too.

    Logits of random weights are so close that no fault moves them far: these are twice as large.
    """

    def sharpen(tensors: Tensors) -> Tensors:
        return tensors | {"model.norm.weight": tensors["model.norm.weight"].times_power(1)}

    sizes = {"max_position_embeddings": 96, "num_local_experts": 4, "intermediate_size": 64}
    plain = write_model(out.with_name(f"{out.name}.plain"), "gpt_oss", **sizes)
    return rewrite_model(plain, out, sharpen)


def each(suffix: str, change: Callable[[Codes], Codes]) -> Callable[[Tensors], Tensors]:
    """Changes the codes of all tensors whose name has that ending."""

    def changed(tensors: Tensors) -> Tensors:
        return tensors | {
            name: Tensor(x.dtype, np.ascontiguousarray(change(x.codes)))
            for name, x in tensors.items()
            if name.endswith(suffix)
        }

    return changed


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
