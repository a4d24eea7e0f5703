"""A checkpoint's layout: which tensors stand for a quantized linear, and what config.json says."""

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
    "check_cache",
    "e4m3",
    "e8m0",
    "float32",
    "kept",
    "weight",
]

Tensors = dict[str, Tensor | PendingTensor]
CacheScale = Literal["q", "k", "v"]
_PART = 4 << 20  # weights encoded at a time


class Layout(Protocol):
    """One `quant_method` of config.json."""

    def check(self, source: Source) -> None:
        """Raises UnsupportedError for what engines refuse in this layout, or get wrong."""

    def warnings(self, source: Source) -> list[str]:
        """What some engine refuses of this checkpoint in this layout, though others load it."""

    def label(self, source: Source) -> str:
        """What the manifest calls it, such as "compressed-tensors float-quantized"."""

    def linear(self, source: Source, linear: Linear) -> Tensors:
        """The tensors in place of `<linear>.weight`, by full name; codes are made when written."""

    def cache_scale_name(self, attention: str, which: CacheScale, fused: bool) -> str:
        """The tensor of a cache scale of that attention module; `fused`: it has a qkv_proj."""

    def config(self, source: Source) -> dict[str, Any]:
        """config.json's `quantization_config`."""

    def side_files(self, source: Source) -> Mapping[str, str]:
        """More files that describe the quantization: name to text."""


def check_cache(source: Source, checkpoint: str) -> None:
    """Raises UnsupportedError for the cache that vLLM refuses with `checkpoint`, "an fp8" one.

    The last thing to check: it says what to do, which must not meet another refusal.
    """
    if source.kv_cache == "e5m2":
        raise UnsupportedError(
            f"vLLM refuses an e5m2 cache with {checkpoint} checkpoint; use --kv e4m3 or --kv"
            " float16, or --format compressed-tensors, which takes e5m2"
        )


def weight(source: Source, linear: Linear) -> PendingTensor:
    """E4M3 [N, K], or E2M1 as U8 [N, K/2] with the even column in the low half."""
    schemes = source.schemes(linear)
    assert schemes is not None
    rows, columns = linear.out_features, linear.in_features
    packed = schemes[0].format == "e2m1"
    dtype, shape = ("U8", (rows, columns // 2)) if packed else ("F8_E4M3", (rows, columns))
    return PendingTensor(
        dtype, shape, lambda: source.weight_codes(linear), lambda: _parts(source, linear)
    )


def _parts(source: Source, linear: Linear) -> Iterator[npt.NDArray[np.uint8]]:
    """`weight_codes`, some rows at a time: what stays in the cache is hashed and written faster."""
    schemes = source.schemes(linear)
    assert schemes is not None
    name = f"{linear.name}.weight"
    stored, scale = source.checkpoint.read(name), source.weight_scale(linear)
    shared = source.weight_global_scale(linear)
    step = max(1, _PART // (linear.in_features * BLOCK)) * BLOCK
    for start in range(0, linear.out_features, step):
        part = Tensor(stored.dtype, stored.codes[start : start + step])
        own = scale
        if scale.ndim:  # a row of scales a row of weights, or of blocks
            each = BLOCK if schemes[0].granularity == "block" else 1
            own = scale[start // each : (start + step) // each]
        try:
            yield weight_codes(part, own, shared, schemes[0], name=name)
        except NumericsError:
            source.weight_codes(linear)  # says how much of the whole is wrong
            raise


def float32(scale: npt.NDArray[np.float32], shape: tuple[int, ...]) -> Tensor:
    return Tensor.of(np.asarray(scale, np.float32).reshape(shape))


def e4m3(scale: npt.NDArray[np.float32]) -> PendingTensor:
    """Scales that are E4M3 numbers, as such."""
    return PendingTensor("F8_E4M3", scale.shape, lambda: formats.encode(scale, E4M3))


def e8m0(scale: npt.NDArray[np.float32]) -> PendingTensor:
    """Scales that are powers of two, as U8 exponents with a bias of 127."""
    return PendingTensor("U8", scale.shape, lambda: formats.encode(scale, E8M0))


def kept(source: Source) -> list[str]:
    """Modules with a matrix that stays in full precision: the head, routers, what is excluded.

    Embeddings are none of them; `lm_head` always is, though tied embeddings have no tensor for it.
    """
    quantized = source.quantized_linears()
    found = ["lm_head"]
    for shard in source.checkpoint.shards:
        for name in shard.names:
            module = name.removesuffix(".weight")
            if len(shard.shape(name)) < 2 or module in quantized:
                continue
            if module == name:  # such as the bare parameters of experts that are stored together
                module = module.rpartition(".")[0]
            if "embed" not in module.rpartition(".")[2]:
                found.append(module)
    return list(dict.fromkeys(found))
