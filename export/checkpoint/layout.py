"""The layout of a checkpoint: the tensors of a quantized linear, and the entries of config.json."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from export.codes import weight_codes
from export.source import Source
from octet.errors import NumericsError, UnsupportedError
from octet.model.spec import Linear
from octet.numerics import formats
from octet.numerics.formats import E4M3, E8M0
from octet.recipe import BLOCK
from octet.storage.tensors import PendingTensor, Tensor

__all__ = [
    "CacheScale",
    "Layout",
    "Tensors",
    "block_scale",
    "check_cache",
    "e4m3",
    "e8m0",
    "float32",
    "kept",
    "weight",
]

Tensors = dict[str, Tensor | PendingTensor]
CacheScale = Literal["q", "k", "v"]
_PART = 4 << 20  # number of weights encoded at a time


class Layout(Protocol):
    """One `quant_method` of config.json."""

    def check(self, source: Source) -> None:
        """Raises UnsupportedError for anything that engines refuse or get wrong in this layout."""

    def warnings(self, source: Source) -> list[str]:
        """Lists engines that refuse this checkpoint in this layout, and why; others load it."""

    def label(self, source: Source) -> str:
        """Returns its name in the manifest, such as "compressed-tensors float-quantized"."""

    def linear(self, source: Source, linear: Linear) -> Tensors:
        """Returns what replaces `<linear>.weight`: tensors by full name, encoded when written."""

    def cache_scale_name(self, attention: str, which: CacheScale, fused: bool) -> str:
        """Names the tensor of a cache scale; `fused` if the attention module has a qkv_proj."""

    def config(self, source: Source) -> dict[str, Any]:
        """Returns config.json's `quantization_config`."""

    def side_files(self, source: Source) -> Mapping[str, str]:
        """Returns further files that describe the quantization: name to text."""


def check_cache(source: Source, checkpoint: str) -> None:
    """Raises UnsupportedError for an E5M2 cache, which vLLM refuses with `checkpoint` ("an fp8").

    Call it after all other checks, so that the options that its message suggests are not refused.
    """
    if source.kv_cache == "e5m2":
        raise UnsupportedError(
            f"vLLM refuses an e5m2 cache with {checkpoint} checkpoint; use --kv e4m3 or --kv"
            " float16, or --format compressed-tensors, which takes e5m2"
        )


def weight(source: Source, linear: Linear) -> PendingTensor:
    """Returns E4M3 [N, K], or E2M1 as U8 [N, K/2], a byte's low half being the even column."""
    schemes = source.quantized_schemes(linear)
    rows, columns = linear.out_features, linear.in_features
    packed = schemes[0].format == "e2m1"
    dtype, shape = ("U8", (rows, columns // 2)) if packed else ("F8_E4M3", (rows, columns))
    return PendingTensor(
        dtype, shape, lambda: source.weight_codes(linear), lambda: _parts(source, linear)
    )


def _parts(source: Source, linear: Linear) -> Iterator[npt.NDArray[np.uint8]]:
    """Yields `weight_codes`, some rows at a time.

    A part that stays in the CPU's cache is hashed and written faster.
    """
    schemes = source.quantized_schemes(linear)
    if source.blocks_of(linear) is not None:
        yield source.weight_codes(linear)
        return
    name = f"{linear.name}.weight"
    stored, scale = source.checkpoint.read(name), source.weight_scale(linear)
    shared = source.weight_global_scale(linear)
    step = max(1, _PART // (linear.in_features * BLOCK)) * BLOCK
    for start in range(0, linear.out_features, step):
        part = Tensor(stored.dtype, stored.codes[start : start + step])
        own = scale
        if scale.ndim:  # one row of scales for each row of weights, or of blocks
            rows_per_scale = BLOCK if schemes[0].granularity == "block" else 1
            own = scale[start // rows_per_scale : (start + step) // rows_per_scale]
        try:
            yield weight_codes(part, own, shared, schemes[0], name=name)
        except NumericsError:
            source.weight_codes(linear)  # raises the same error, with counts of the whole tensor
            raise


def block_scale(source: Source, linear: Linear) -> Tensor:
    """Returns scales [⌈N/128⌉, ⌈K/128⌉] as the checkpoint stores them, or else in float32."""
    blocks, scale = source.blocks_of(linear), source.weight_scale(linear)
    return float32(scale, scale.shape) if blocks is None else blocks[1]


def float32(scale: npt.NDArray[np.float32], shape: tuple[int, ...]) -> Tensor:
    """Stores scales as float32, in `shape`."""
    return Tensor.of(np.asarray(scale, np.float32).reshape(shape))


def e4m3(scale: npt.NDArray[np.float32]) -> PendingTensor:
    """Stores scales that are E4M3 values as E4M3."""
    return PendingTensor("F8_E4M3", scale.shape, lambda: formats.encode(scale, E4M3))


def e8m0(scale: npt.NDArray[np.float32]) -> PendingTensor:
    """Stores scales that are powers of two as U8 exponents with a bias of 127."""
    return PendingTensor("U8", scale.shape, lambda: formats.encode(scale, E8M0))


def kept(source: Source) -> list[str]:
    """Lists modules whose matrix stays in full precision: the head, routers, excluded linears.

    Embeddings are not listed. `lm_head` always is, though tied embeddings have no tensor for it.
    """
    quantized = source.quantized_linears()
    found = ["lm_head"]
    for name in source.checkpoint.tensor_names:
        module = name.removesuffix(".weight")
        if len(source.checkpoint.shape(name)) < 2 or module in quantized:
            continue
        if module == name:  # no ".weight", such as parameters of experts stored together
            module = module.rpartition(".")[0]
        if "embed" not in module.rpartition(".")[2]:
            found.append(module)
    return list(dict.fromkeys(found))
