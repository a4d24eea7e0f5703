"""Quantizes arrays with torchao; its interpreter runs this, one process for all of them.

    python -m tests.integration.torchao_peer INPUTS OUT

INPUTS is an .npz of float32 [N, K] arrays, K a multiple of 32. OUT gets, for each array, codes of
one byte an element, and scales as they multiply. torchao's kernels for a CPU are plain torch.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

MODES = ("rceil", "even", "floor", "ceil")


def mx(x: torch.Tensor, element: torch.dtype, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [N, K] and scales [N, K/32], both by torchao's `to_mx`."""
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

    scale, codes = to_mx(x, element, 32, ScaleCalculationMode(mode))
    return unpacked(codes), scale.float()


def nvfp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [N, K] and E4M3 scales [N, K/16], under a global scale of `amax / (448 * 6)`."""
    from torchao.prototype.mx_formats import nvfp4_tensor

    shared = nvfp4_tensor.per_tensor_amax_to_scale(x.abs().max())
    scale, codes = nvfp4_tensor.nvfp4_quantize(x, per_tensor_scale=shared)
    return unpacked(codes), scale.float().reshape(len(x), -1)


def served(x: torch.Tensor, fmt: torch.dtype, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What `quantize_(model, Float8...Config())` computes: codes [N, K], scales [N/rows, 1]."""
    from torchao.quantization import quant_primitives

    scale = quant_primitives._choose_scale_float8(x, [rows, x.shape[1]], fmt)
    codes = quant_primitives._quantize_affine_float8(x, scale, fmt)
    return codes.view(torch.uint8), scale.float()


def trained(x: torch.Tensor, fmt: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """What `Float8Linear` computes: codes [N, K], and the scale [] by which it multiplies."""
    from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

    scale = tensor_to_scale(x, fmt)
    return to_fp8_saturated(x * scale, fmt).view(torch.uint8), scale


def unpacked(codes: torch.Tensor) -> torch.Tensor:
    """One code a byte; E2M1 comes two a byte, the first in the low bits."""
    if codes.dtype == torch.float8_e4m3fn:
        return codes.view(torch.uint8)
    return torch.stack([codes & 15, codes >> 4], -1).flatten(-2)


def main(inputs: Path, out: Path) -> None:
    found: dict[str, Any] = {}

    def keep(name: str, codes_and_scales: tuple[torch.Tensor, torch.Tensor]) -> None:
        found[f"{name} codes"], found[f"{name} scales"] = (x.numpy() for x in codes_and_scales)

    for name, array in np.load(inputs).items():
        x = torch.from_numpy(array)
        for mode in MODES:
            keep(f"{name} mxfp8 {mode}", mx(x, torch.float8_e4m3fn, mode))
            keep(f"{name} mxfp4 {mode}", mx(x, torch.float4_e2m1fn_x2, mode))
        keep(f"{name} nvfp4", nvfp4(x))
        for fmt, torch_name in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
            keep(f"{name} {fmt} tensor", served(x, torch_name, len(x)))
            keep(f"{name} {fmt} row", served(x, torch_name, 1))
            keep(f"{name} {fmt} bfloat16 row", served(x.bfloat16(), torch_name, 1))
            keep(f"{name} {fmt} trained", trained(x, torch_name))
    np.savez(out, **found)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
