"""Tensors that are hard for a histogram, and the plain way to count one."""

import numpy as np
import torch
from numpy.typing import NDArray

from octet.artifacts.calibration import BINS
from octet.numerics.bits import float32_to_bf16

SPECIALS = [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1.0, -1.0, 448.0, 3.4e38, 1e-40]


def contents(size: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Tensors that are hard for a histogram: equal bins, specials, every exponent, every code."""
    generator = torch.Generator().manual_seed(size)
    bits = torch.randint(-(2**31), 2**31, (size,), generator=generator, dtype=torch.int64)
    any_float32 = bits.to(torch.int32).view(torch.float32)
    any_half = bits.to(torch.int16).view(dtype) if dtype.itemsize == 2 else any_float32
    return {
        "zeros": torch.zeros(size, dtype=dtype),
        "negative zeros": -torch.zeros(size, dtype=dtype),
        "all equal": torch.full((size,), 3.14159).to(dtype),
        "all NaN": torch.full((size,), float("nan")).to(dtype),
        "specials": torch.tensor(SPECIALS).repeat(size // len(SPECIALS) + 1)[:size].to(dtype),
        "subnormal": (torch.rand(size, generator=generator) * 1e-38).to(dtype),
        "normal": torch.randn(size, generator=generator).to(dtype),
        "any bits": any_half,
        "every code": torch.arange(size, dtype=torch.int64).to(torch.int16).view(torch.bfloat16)
        if dtype == torch.bfloat16
        else any_half,
    }


def count_reference(x: torch.Tensor) -> NDArray[np.int64]:
    """int64[32768]: how often each magnitude code occurs in x, float32 rounded to bfloat16."""
    flat = x.detach().cpu().flatten()
    if x.dtype == torch.float32:
        codes = float32_to_bf16(flat.numpy())
    else:
        codes = flat.view(torch.int16).numpy().view(np.uint16)
    return np.bincount(codes & 0x7FFF, minlength=BINS)
