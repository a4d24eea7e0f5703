"""Weights as the codes that every export stores."""

import numpy as np
import numpy.typing as npt

from octet import formats, microscaling, scaling
from octet.recipe import TensorScheme
from octet.tensors import Tensor

__all__ = ["weight_codes"]


def weight_codes(
    weight: Tensor,
    scale: npt.NDArray[np.float32],
    global_scale: npt.NDArray[np.float32] | None,
    scheme: TensorScheme,
    *,
    name: str | None = None,
) -> npt.NDArray[np.uint8]:
    """Codes of `weight` [N, K] divided by its scales, rounded to nearest even, saturating.

    E4M3 [N, K]; E2M1 packed [N, K/2], the even column in the low half of a byte. NumericsError
    naming the tensor for NaN or Inf.
    """
    fmt = formats.format_named(scheme.format)
    granularity = scaling.Granularity.of(scheme.granularity, scheme.group_size)
    factor = microscaling.combined(scale, global_scale)
    codes = scaling.quantize(weight.float32(), factor, fmt, granularity, name=name)
    if fmt.bits == 8:
        return codes
    packed: npt.NDArray[np.uint8] = codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)
    return packed
