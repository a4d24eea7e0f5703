"""Decodes weights that a checkpoint stores as E4M3 in blocks of 128 by 128, with a scale for each.

| `quant_method`     | scale of `<linear>.weight`, F32 or BF16 [⌈N/128⌉, ⌈K/128⌉]               |
|--------------------|--------------------------------------------------------------------------|
| fp8                | `<linear>.weight_scale_inv`, which multiplies in spite of its name        |
| compressed-tensors | `<linear>.weight_scale`, strategy `block` in every config group           |

A weight is decoded as `code * scale`, a float32 product, then rounded to BF16 if the checkpoint
stores its other tensors so: engines and transformers compute with that, and one rounding by 2^-9 is
small beside E4M3's 2^-4. Otherwise it stays float32; FP16 would not hold every scale.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from octet.errors import CheckpointError
from octet.model.block_format import BlockFormat
from octet.numerics import scaling
from octet.numerics.bits import float32_to_bf16
from octet.numerics.formats import E4M3
from octet.storage.tensors import Tensor

__all__ = ["BlockWeights", "decode_blocks", "find_blocks"]

_CODES = "F8_E4M3"
_SCALES = ("F32", "BF16")
_ROWS = 1024  # decoded at a time: whole blocks
_CACHE = re.compile(r".*\.self_attn\.(.+\.)?([qkv]_scale|[qkv]_proj\.output_scale)")


@dataclass(frozen=True)
class BlockWeights:
    """The scale tensor of each weight that is stored in blocks, and the dtype it is decoded to."""

    scales: Mapping[str, str]  # `<linear>.weight` -> the name of its scale
    dtype: str  # BF16 or F32

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of a decoded weight, which is that of its codes."""
        return stored

    def decode(self, name: str, read: Callable[[str], Tensor]) -> Tensor:
        """Returns the decoded weight `name`; `read` returns a tensor as it is stored."""
        return decode_blocks(read(name), read(self.scales[name]), self.dtype)


def find_blocks(
    fmt: BlockFormat,
    linears: Iterable[str],
    stored: Mapping[str, tuple[str, tuple[int, ...]]],
    read: Callable[[str], Tensor],
    where: str,
) -> BlockWeights:
    """Finds the block weights of a checkpoint, and checks every scale; decodes no weight.

    `linears` are module names; `stored` has the dtype and shape of each tensor. Raises
    CheckpointError, naming the tensor, if config.json and the tensors disagree, or if a scale is
    missing, of another shape, or not positive and finite.
    """
    scales: dict[str, str] = {}
    for linear in linears:
        weight, scale = f"{linear}.weight", f"{linear}.{fmt.scale}"
        if weight not in stored:
            continue  # reported as missing, together with other tensors
        coded, ignored = stored[weight][0] == _CODES, fmt.ignores(linear)
        if coded == ignored:
            says = "leaves it unquantized" if ignored else "has it in FP8 blocks"
            raise CheckpointError(
                f"{where}: {weight} is stored as {stored[weight][0]}, and config.json's"
                f" quantization_config {says}; download both again"
            )
        if coded:
            _check_scale(scale, stored.get(scale), stored[weight][1], where)
            scales[weight] = scale
    cache = next((name for name in stored if _CACHE.fullmatch(name)), None)
    if cache is not None:
        raise CheckpointError(
            f"{where}: {cache} is a scale of a cache, and Octet calibrates the cache itself; give"
            " the checkpoint without it"
        )
    for name in scales.values():
        _check_values(name, read(name), where)
    used = {*scales, *scales.values()}
    others = {dtype for name, (dtype, _) in stored.items() if name not in used}
    return BlockWeights(scales, "BF16" if "BF16" in others else "F32")


def _check_scale(
    name: str, found: tuple[str, tuple[int, ...]] | None, shape: tuple[int, ...], where: str
) -> None:
    if found is None:
        raise CheckpointError(
            f"{where}: {name} is missing, and its weight in FP8 cannot be decoded without it;"
            " download it, too"
        )
    dtype, held = found
    expected = scaling.BLOCK.scale_shape(shape) if len(shape) == 2 else ()
    if held != expected:
        raise CheckpointError(
            f"{where}: {name} has shape {list(held)}, and a weight {list(shape)} in blocks of 128"
            f" by 128 has scales {list(expected)}"
        )
    if dtype not in _SCALES:
        raise CheckpointError(f"{where}: {name} is stored as {dtype}; Octet reads F32 and BF16")


def _check_values(name: str, scale: Tensor, where: str) -> None:
    values = scale.float32()
    with np.errstate(over="ignore", invalid="ignore"):
        wrong = ~(np.isfinite(values * np.float32(E4M3.max)) & (values > 0))
    if wrong.any():
        at = np.argwhere(wrong)[0].tolist()
        raise CheckpointError(
            f"{where}: {name} is {values[tuple(at)]:g} at {at}: a scale has to be positive, and"
            " finite times 448; quantize the original again"
        )


def decode_blocks(codes: Tensor, scale: Tensor, dtype: str) -> Tensor:
    """Decodes E4M3 codes [N, K] by their scales [⌈N/128⌉, ⌈K/128⌉] to `dtype`, BF16 or F32."""
    factor = scale.float32()
    values = np.empty(codes.shape, np.uint16 if dtype == "BF16" else np.float32)
    for start in range(0, len(values), _ROWS):
        part = slice(start, start + _ROWS)
        own = factor[start // 128 : (start + _ROWS) // 128]
        real = scaling.dequantize(codes.codes[part], own, E4M3, scaling.BLOCK)
        values[part] = float32_to_bf16(real) if dtype == "BF16" else real
    return Tensor(dtype, values)
