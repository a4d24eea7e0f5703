"""The compressed-tensors layout: vLLM's own tools write it, and only it takes an E5M2 cache.

| scheme | format               | tensors of a linear                                             |
|--------|----------------------|-----------------------------------------------------------------|
| fp8    | float-quantized      | weight E4M3 [N, K]; weight_scale f32 [1], [N, 1] or             |
|        |                      | [⌈N/128⌉, ⌈K/128⌉]; static inputs: input_scale f32 [1]          |
| nvfp4  | nvfp4-pack-quantized | weight_packed u8 [N, K/2]; weight_scale E4M3 [N, K/16];         |
|        |                      | weight_global_scale, input_global_scale f32 [1], divisors       |
| mxfp4  | mxfp4-pack-quantized | weight_packed u8 [N, K/2]; weight_scale u8 (E8M0) [N, K/32]     |
| mxfp8  | mxfp8-quantized      | weight E4M3 [N, K]; weight_scale u8 (E8M0) [N, K/32]            |

A recipe that mixes them becomes several config_groups and the format "mixed-precision".
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from export.checkpoint.layout import (
    CacheScale,
    Tensors,
    block_scale,
    e4m3,
    e8m0,
    float32,
    kept,
    weight,
)
from export.source import Source
from octet.errors import UnsupportedError
from octet.model.spec import Linear
from octet.recipe import TensorScheme
from octet.storage.tensors import Tensor

__all__ = ["CompressedTensors"]

_FORMATS = {
    "fp8": "float-quantized",
    "nvfp4": "nvfp4-pack-quantized",
    "mxfp4": "mxfp4-pack-quantized",
    "mxfp8": "mxfp8-quantized",
}
# (weights, activations): granularities of FP8 that vLLM serves; the last pair not for experts.
_FP8_PAIRS = (("channel", "token"), ("tensor", "tensor"), ("block", "group"), ("channel", "tensor"))
# The kv_cache_scheme of an E4M3 cache. With it, vLLM's cache dtype "auto" is E4M3, and E5M2 is
# refused, so a checkpoint for an E5M2 cache has none.
_E4M3_CACHE = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "symmetric": True,
    "dynamic": False,
}


class CompressedTensors:
    """The layout `compressed-tensors`; methods are those of `Layout`."""

    def check(self, source: Source) -> None:
        for linear in source.quantized_linears().values():
            weights, inputs = source.quantized_schemes(linear)
            pair = (weights.granularity, inputs.granularity)
            served = _FP8_PAIRS[:-1] if ".experts." in linear.name else _FP8_PAIRS
            if weights.kind != inputs.kind or (weights.kind == "fp8" and pair not in served):
                other = "" if weights.kind == inputs.kind else f"{inputs.kind} "
                raise UnsupportedError(
                    f"recipe {source.recipe.name}: {linear.name} has {weights.kind} {pair[0]}"
                    f" weights with {other}{pair[1]} activations, which is no combination that"
                    " vLLM serves; use those of fp8, fp8-static, fp8-block, mxfp8, mxfp4 or nvfp4"
                )

    def warnings(self, source: Source) -> list[str]:
        return []

    def label(self, source: Source) -> str:
        return f"compressed-tensors {_format(_groups(source))}"

    def linear(self, source: Source, linear: Linear) -> Tensors:
        weights, inputs = source.quantized_schemes(linear)
        scale, codes = source.weight_scale(linear), weight(source, linear)
        match weights.kind:
            case "nvfp4":
                stored: Tensors = {"weight_packed": codes, "weight_scale": e4m3(scale)}
                shared = source.weight_global_scale(linear)
                assert shared is not None
                stored["weight_global_scale"] = _divisor(shared)
                stored["input_global_scale"] = _divisor(source.input_global_scale(linear))
            case "mxfp4":
                stored = {"weight_packed": codes, "weight_scale": e8m0(scale)}
            case "mxfp8":
                stored = {"weight": codes, "weight_scale": e8m0(scale)}
            case _:
                stored = {"weight": codes, "weight_scale": float32(scale, scale.shape or (1,))}
                if weights.blocks:
                    stored["weight_scale"] = block_scale(source, linear)
                if not inputs.dynamic:
                    stored["input_scale"] = float32(source.input_scale(linear), (1,))
        return {f"{linear.name}.{name}": tensor for name, tensor in stored.items()}

    def cache_scale_name(self, attention: str, which: CacheScale, fused: bool) -> str:
        return f"{attention}.{which}_scale"

    def config(self, source: Source) -> dict[str, Any]:
        groups = _groups(source)
        # vLLM matches a module's name first, its class last. So the largest group can be given by
        # class, "Linear", unless the architecture has modules that Octet does not know.
        largest = max(groups, key=lambda key: len(groups[key]))
        described = {}
        for index, (key, linears) in enumerate(groups.items()):
            schemes = source.quantized_schemes(linears[0])
            by_class = key == largest and not source.spec.generic
            names = _patterns(source, [linear.name for linear in linears])
            described[f"group_{index}"] = {
                "targets": ["Linear"] if by_class else names,
                "format": _FORMATS[schemes[0].kind],
                "weights": _arguments(schemes[0]),
                "input_activations": _arguments(schemes[1]),
                "output_activations": None,
            }
        return {
            "quant_method": "compressed-tensors",
            "format": _format(groups),
            "quantization_status": "compressed",
            "ignore": _patterns(source, kept(source)),
            "kv_cache_scheme": dict(_E4M3_CACHE) if source.kv_cache == "e4m3" else None,
            "config_groups": described,
        }

    def side_files(self, source: Source) -> Mapping[str, str]:
        return {}


def _divisor(scale: npt.NDArray[np.float32]) -> Tensor:
    """Inverts a global scale of NVFP4: in this format alone, it is stored as a divisor."""
    return float32(np.float32(1) / scale, (1,))


def _groups(source: Source) -> dict[str, list[Linear]]:
    """Groups linears by the content of their config_group, apart from its targets."""
    found: dict[str, list[Linear]] = {}
    for linear in source.quantized_linears().values():
        schemes = source.quantized_schemes(linear)
        key = " ".join(str(_arguments(scheme)) for scheme in schemes)
        found.setdefault(f"{_FORMATS[schemes[0].kind]} {key}", []).append(linear)
    return found


def _format(groups: Iterable[str]) -> str:
    formats = {group.partition(" ")[0] for group in groups}
    return formats.pop() if len(formats) == 1 else "mixed-precision"


def _arguments(scheme: TensorScheme) -> dict[str, Any]:
    """Returns compressed-tensors' QuantizationArgs."""
    described: dict[str, Any] = {
        "num_bits": 4 if scheme.format == "e2m1" else 8,
        "type": "float",
        "strategy": "tensor_group" if scheme.two_level else scheme.granularity,
        "symmetric": True,
        "dynamic": "local" if scheme.two_level and scheme.dynamic else scheme.dynamic,
    }
    if scheme.granularity == "block":
        described["block_structure"] = [scheme.group_size, scheme.group_size]
    elif scheme.granularity == "group":
        described["group_size"] = scheme.group_size
    if scheme.scale_format != "float32":
        names = {"e8m0": "torch.uint8", "e4m3": "torch.float8_e4m3fn"}
        described["scale_dtype"] = names[scheme.scale_format]
    return described


def _patterns(source: Source, modules: list[str]) -> list[str]:
    """Names the modules, with one pattern for a layer's experts, which have one scheme."""
    found: dict[str, None] = {}
    for module in modules:
        experts, inside, _ = module.partition(".experts.")
        found[f"re:{re.escape(experts)}\\.experts\\..*" if inside else module] = None
    return list(found)
