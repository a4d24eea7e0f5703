"""`quant_method: fp8`: the layout of DeepSeek's checkpoints (block) and of the first FP8 ones.

| schemes (weights, inputs) | tensors of a linear                                                |
|---------------------------|--------------------------------------------------------------------|
| fp8 block, group          | weight E4M3 [N, K]; weight_scale_inv f32 [⌈N/128⌉, ⌈K/128⌉], which |
|                           | multiplies in spite of its name                                    |
| fp8 tensor, tensor        | weight E4M3 [N, K]; weight_scale, input_scale f32 [1]              |

Blocks of a checkpoint that is in this format already are copied, scales in their own dtype.
vLLM refuses an E5M2 cache with this layout.
"""

from collections.abc import Mapping
from typing import Any

from export.checkpoint.fused import describe
from export.checkpoint.layout import (
    CacheScale,
    Tensors,
    block_scale,
    check_cache,
    float32,
    kept,
    weight,
)
from export.source import Source
from octet.errors import UnsupportedError
from octet.model.spec import Linear
from octet.recipe import BLOCK

__all__ = ["Fp8"]

_SERVED = (("block", "group"), ("tensor", "tensor"))


class Fp8:
    """The layout `fp8`; methods are those of `Layout`."""

    def check(self, source: Source) -> None:
        linears = list(source.quantized_linears().values())
        for linear in linears:
            schemes = source.quantized_schemes(linear)
            pair = (schemes[0].granularity, schemes[1].granularity)
            if {x.kind for x in schemes} != {"fp8"} or pair not in _SERVED:
                raise UnsupportedError(
                    f"recipe {source.recipe.name}: {linear.name} has {describe(source, linear)},"
                    " which an fp8 checkpoint cannot hold; use --format compressed-tensors, or the"
                    " schemes of fp8-block or fp8-static"
                )
            if _is_block(source, linear) != _is_block(source, linears[0]):
                raise UnsupportedError(
                    f"recipe {source.recipe.name} mixes {describe(source, linears[0])}"
                    f" ({linears[0].name}) and {describe(source, linear)} ({linear.name}); an fp8"
                    " checkpoint has one; use --format compressed-tensors"
                )
        check_cache(source, "an fp8")

    def warnings(self, source: Source) -> list[str]:
        return []

    def label(self, source: Source) -> str:
        return f"fp8 {'block' if _is_block(source) else 'per tensor'}"

    def linear(self, source: Source, linear: Linear) -> Tensors:
        tensors: Tensors = {f"{linear.name}.weight": weight(source, linear)}
        if _is_block(source, linear):
            tensors[f"{linear.name}.weight_scale_inv"] = block_scale(source, linear)
        else:
            scale = source.weight_scale(linear)
            tensors[f"{linear.name}.weight_scale"] = float32(scale, (1,))
            tensors[f"{linear.name}.input_scale"] = float32(source.input_scale(linear), (1,))
        return tensors

    def cache_scale_name(self, attention: str, which: CacheScale, fused: bool) -> str:
        if fused:
            return f"{attention}.{which}_scale"
        return f"{attention}.{which}_proj.output_scale"

    def config(self, source: Source) -> dict[str, Any]:
        block, ignored = _is_block(source), kept(source)
        described: dict[str, Any] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic" if block else "static",
            "ignored_layers": ignored,
            "modules_to_not_convert": ignored,  # transformers' name for them
        }
        return described | ({"weight_block_size": [BLOCK, BLOCK]} if block else {})

    def side_files(self, source: Source) -> Mapping[str, str]:
        return {}


def _is_block(source: Source, linear: Linear | None = None) -> bool:
    schemes = source.quantized_schemes(linear or next(iter(source.quantized_linears().values())))
    return schemes[0].granularity == "block"
