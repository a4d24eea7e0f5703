"""The result of an algorithm that changes weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octet.numerics.bits import float32_to_bf16
from octet.storage.tensors import PendingTensor, Tensor

__all__ = ["Changed", "in_stored_dtype"]

Float32Array = NDArray[np.float32]


@dataclass(frozen=True)
class Changed:
    """Tensors that replace those of the same names in the checkpoint.

    `scales` are the grid that gptq and recover have put the weights on, under the calibration's
    names (`<linear>.weight_scale`, ...): any other scale would round them a second time. `details`
    are for the manifest.
    """

    tensors: Mapping[str, Tensor | PendingTensor]
    scales: dict[str, Float32Array] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)


def in_stored_dtype(values: Float32Array, dtype: str) -> Tensor:
    """Rounds `values` to the checkpoint's `dtype`, a tag of safetensors.

    A 16-bit dtype rounds a value of the grid by far less than half the grid's step, so quantizing
    it with the grid's own scale gives the same code.
    """
    if dtype == "BF16":
        return Tensor(dtype, float32_to_bf16(values))
    return Tensor.of(values.astype(np.float16 if dtype == "F16" else np.float32))
