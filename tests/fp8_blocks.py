"""Quantizes a checkpoint in FP8 blocks as DeepSeek and llm-compressor do, with torch alone."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

__all__ = ["FP8", "LLM_COMPRESSOR", "quantize_in_blocks", "write_config"]

Tensors = dict[str, torch.Tensor]

FP8: dict[str, Any] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
LLM_COMPRESSOR: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "float",
                "strategy": "block",
                "block_structure": [128, 128],
                "symmetric": True,
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "float",
                "strategy": "group",
                "group_size": 128,
                "symmetric": True,
                "dynamic": True,
            },
        }
    },
}


def quantize_in_blocks(
    model: Path,
    out: Path,
    layout: dict[str, Any],
    *,
    scales: torch.dtype = torch.float32,
    others: torch.dtype = torch.bfloat16,
    keep: Sequence[str] = (),
    change: Callable[[Tensors], Tensors] = dict,
) -> Tensors:
    """Writes `model` in that layout to `out`; returns the real weights, float32, by name.

    `others` is the dtype of what stays unquantized: all but projections, and those that `keep`
    names. `change` changes the tensors that are written.
    """
    shutil.copytree(model, out, ignore=shutil.ignore_patterns("*.safetensors*"))
    suffix = "scale_inv" if layout["quant_method"] == "fp8" else "scale"
    real: Tensors = {}
    for file in sorted(model.glob("*.safetensors")):
        written: Tensors = {}
        for name, tensor in load_file(file).items():
            if not name.endswith("_proj.weight") or any(x in name for x in keep):
                written[name] = tensor.to(others)
                continue
            codes, scale, real[name] = _quantize(tensor.float(), scales)
            written |= {name: codes, f"{name}_{suffix}": scale}
        save_file(change(written), out / file.name, {"format": "pt"})
    write_config(out, layout | ({"modules_to_not_convert": list(keep)} if keep else {}))
    return real


def write_config(path: Path, layout: dict[str, Any] | None) -> None:
    """Gives config.json that `quantization_config`, or none."""
    config = json.loads((path / "config.json").read_text())
    config.pop("quantization_config", None)
    config |= {} if layout is None else {"quantization_config": layout}
    (path / "config.json").write_text(json.dumps(config))


def _quantize(weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Returns E4M3 codes, scales of each 128 by 128, and what they decode to in float32.

    Scales are twice as large as needed, so that nobody finds the same ones from the decoded weight.
    """
    rows, columns = weight.shape
    scale = torch.empty(-(-rows // 128), -(-columns // 128), dtype=dtype)
    codes, real = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1))
            scale[i, j] = weight[block].abs().max() / 224
            codes[block] = (weight[block] / scale[i, j].float()).to(torch.float8_e4m3fn)
            real[block] = codes[block].float() * scale[i, j].float()
    return codes, scale, real
