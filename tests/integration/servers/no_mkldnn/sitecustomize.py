"""Keeps oneDNN out of FP8 products, in the processes of a vLLM server on a CPU with AMX.

There torch 2.13 gives products with one scale to oneDNN, whose reference kernel takes 2 s for 16
rows of 256 by 2,048. Without oneDNN torch multiplies them itself, as on other CPUs.
"""

from typing import Any

import torch

_multiply = torch._scaled_mm


def _without(*args: Any, **options: Any) -> Any:
    if torch.compiler.is_compiling():
        return _multiply(*args, **options)
    with torch.backends.mkldnn.flags(enabled=False):
        return _multiply(*args, **options)


torch._scaled_mm = _without
