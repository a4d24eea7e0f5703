"""Rounds inside ModelOpt's quantizers, so that its algorithms search on the grid we serve.

ModelOpt calls a registered backend with a tensor and its quantizer. The quantizer carries a
`Rounding`: a scheme of the recipe and, where they are static, its scales.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from calibrate.decoder.rounding import fake_quantize, round_to
from octet.numerics.formats import E4M3, FORMATS
from octet.recipe import TensorScheme

__all__ = ["BACKEND", "attach_rounding", "register_backend"]

BACKEND = "octet"


@dataclass(frozen=True)
class Rounding:
    """A quantizer's scheme, and its fixed scales if it has them.

    `scale` and `global_scale` are those of weights on a fixed grid. If they are None, they are
    computed from the tensor itself. Static scales of activations are computed from the largest
    magnitude that ModelOpt saw.
    """

    scheme: TensorScheme
    of_input: bool = False
    scale: torch.Tensor | None = None
    global_scale: torch.Tensor | None = None


def attach_rounding(
    model: Any,
    schemes: Mapping[str, tuple[TensorScheme, TensorScheme]],
    scales: Mapping[str, NDArray[np.float32]],
) -> None:
    """Sets how the quantizers of each linear in `schemes` round.

    Weights take `<linear>.weight_scale` and `.weight_global_scale` from `scales`, if present.
    """
    for name, (weights, inputs) in schemes.items():
        module = model.get_submodule(name)

        def tensor(key: str, device: torch.device = module.weight.device) -> torch.Tensor | None:
            return (
                None if key not in scales else torch.from_numpy(np.asarray(scales[key])).to(device)
            )

        module.weight_quantizer.octet_rounding = Rounding(
            weights,
            scale=tensor(f"{name}.weight_scale"),
            global_scale=tensor(f"{name}.weight_global_scale"),
        )
        module.input_quantizer.octet_rounding = Rounding(inputs, of_input=True)


def register_backend() -> None:
    """Registers the backend with ModelOpt; a second call is harmless."""
    from modelopt.torch.quantization.nn import is_registered_quant_backend, register_quant_backend
    from modelopt.torch.quantization.utils.calib_utils import GPTQHelper, register_gptq_helper

    class ColumnwiseHelper(GPTQHelper):  # type: ignore[misc]
        """ModelOpt's GPTQ helper, changed to round one column instead of the whole matrix.

        ModelOpt quantizes all of [N, K] and uses one column of the result, K times. On a fixed
        grid, rounding the column alone gives the same bits.
        """

        def _blockwise_update(self, block_size: int) -> None:
            rounding = self.module.weight_quantizer.octet_rounding
            update_blockwise(self.weight, self.h_inv, block_size, rounding)

    if not is_registered_quant_backend(BACKEND):
        register_quant_backend(BACKEND, _round)
        register_gptq_helper(BACKEND, ColumnwiseHelper)


def update_blockwise(
    weight: torch.Tensor, h_inv: torch.Tensor, block_size: int, rounding: Rounding
) -> None:
    """Applies GPTQ's update to float32 `weight` [N, K] in place.

    Does what ModelOpt's `gptq_blockwise_update` does. `h_inv` [K, K] is the upper Cholesky factor
    of the inverse Hessian. Each column is rounded. Its error, spread as the inverse Hessian says,
    is subtracted from the columns to its right.
    """
    fmt = FORMATS[rounding.scheme.format]
    scale = _expanded(rounding, weight)
    for start in range(0, weight.shape[1], block_size):
        stop = min(start + block_size, weight.shape[1])
        factor = h_inv[start:stop, start:stop]
        block = weight[:, start:stop].clone()
        errors = torch.zeros_like(block)
        for i in range(stop - start):
            column, own = block[:, i], scale[:, start + i]
            rounded = round_to(column / own, fmt).mul_(own)
            weight[:, start + i] = rounded
            errors[:, i] = (column - rounded) / factor[i, i]
            block[:, i:].addr_(errors[:, i], factor[i, i:], alpha=-1)
        weight[:, stop:].addmm_(errors, h_inv[start:stop, stop:], alpha=-1)


def _expanded(rounding: Rounding, weight: torch.Tensor) -> torch.Tensor:
    """Returns the scale of each element of `weight` [N, K], float32."""
    scheme, scale = rounding.scheme, rounding.scale
    assert scale is not None
    if scheme.group_size is not None:
        if scheme.granularity == "block":
            scale = scale.repeat_interleave(scheme.group_size, 0)[: weight.shape[0]]
        if rounding.global_scale is not None:
            scale = scale * rounding.global_scale
        scale = scale.repeat_interleave(scheme.group_size, 1)[:, : weight.shape[1]]
    return scale.expand(weight.shape)


@torch.no_grad()
def _round(x: torch.Tensor, quantizer: Any) -> torch.Tensor:
    """Rounds a weight `x` [N, K] or activations [..., K]; ModelOpt calls it as the backend."""
    rounding: Rounding = quantizer.octet_rounding
    scheme, scale, global_scale = rounding.scheme, rounding.scale, rounding.global_scale
    fmt = FORMATS[scheme.format]
    if scale is None and (scheme.two_level or (not scheme.dynamic and rounding.of_input)):
        amax = (quantizer.amax if rounding.of_input else x.abs().amax()).float()
        if scheme.two_level:
            global_scale = amax / (fmt.max * E4M3.max)
        else:
            scale = amax / fmt.max
    return fake_quantize(x, scheme, scale, global_scale)
