"""Counts the magnitude codes of 16-bit floats with numpy, without waiting for a compiler.

`calibrate.observe.counting_cpu` counts the same bins faster, once numba has compiled it.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from octet.numerics.bits import float32_to_bf16

__all__ = ["BINS", "count_codes"]

BINS = 1 << 15  # magnitude codes: the 15 bits below the sign


def count_codes(x: NDArray[np.floating[Any]]) -> NDArray[np.int64]:
    """Returns int64 [32768]: how often each magnitude code occurs in `x`, of any shape.

    A float32 is first rounded to bfloat16, to nearest even. The codes of a float16 are its own.
    """
    codes = x.view(np.uint16) if x.dtype == np.float16 else float32_to_bf16(x)
    return np.bincount((codes & 0x7FFF).reshape(-1), minlength=BINS).astype(np.int64, copy=False)
