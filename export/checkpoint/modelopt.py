"""ModelOpt's layout, for TensorRT-LLM, SGLang and vLLM; every scale multiplies.

| schemes (weights, inputs)  | quant_algo                | tensors of a linear                     |
|----------------------------|---------------------------|-----------------------------------------|
| fp8 tensor, tensor         | FP8                       | weight E4M3; weight_scale, input_scale  |
|                            |                           | f32 []                                  |
| fp8 channel, token         | FP8_PER_CHANNEL_PER_TOKEN | weight E4M3; weight_scale f32 [N]       |
| fp8 block, group           | FP8_PB_WO                 | weight E4M3; weight_scale f32           |
|                            |                           | [⌈N/128⌉, 1, ⌈K/128⌉, 1]                |
| nvfp4                      | NVFP4                     | weight u8 [N, K/2]; weight_scale E4M3   |
|                            |                           | [N, K/16]; weight_scale_2, input_scale  |
|                            |                           | f32 []                                  |

vLLM refuses an E5M2 cache with this layout, and loads experts only in FP8 and NVFP4.
"""

import json
from collections.abc import Mapping
from typing import Any

from export.checkpoint.fused import describe
from export.checkpoint.layout import CacheScale, Tensors, check_cache, e4m3, float32, kept, weight
from export.source import Source
from octet.errors import UnsupportedError
from octet.model.spec import Linear

__all__ = ["ModelOpt"]

QUANT_CONFIG_FILE = "hf_quant_config.json"
_ALGORITHMS = {
    ("fp8", "tensor", "tensor"): "FP8",
    ("fp8", "channel", "token"): "FP8_PER_CHANNEL_PER_TOKEN",
    ("fp8", "block", "group"): "FP8_PB_WO",
    ("nvfp4", "group", "group"): "NVFP4",
}
_TIED = (
    "vLLM 0.24 does not load a modelopt checkpoint with tied embeddings (NotImplementedError in"
    " tie_weights); use --format compressed-tensors, or a model whose head has a tensor of its own"
)
_PRODUCER = {"name": "modelopt"}  # loaders recognize the layout by this name
_E4M3_CACHE = {"dynamic": False, "num_bits": 8, "type": "float"}


class ModelOpt:
    """The layout `modelopt`; methods are those of `Layout`."""

    def check(self, source: Source) -> None:
        linears = list(source.quantized_linears().values())
        for linear in linears:
            algorithm = _algorithm(source, linear)
            experts = ".experts." in linear.name
            held = "fp8-static or nvfp4" if experts else "fp8, fp8-static, fp8-block or nvfp4"
            if algorithm is None or (experts and algorithm not in ("FP8", "NVFP4")):
                raise UnsupportedError(
                    f"recipe {source.recipe.name}: {linear.name} has {describe(source, linear)},"
                    f" which a modelopt checkpoint cannot hold{' of experts' if experts else ''};"
                    f" use --format compressed-tensors, or the schemes of {held}"
                )
            if algorithm != _algorithm(source, linears[0]):
                raise UnsupportedError(
                    f"recipe {source.recipe.name} mixes {describe(source, linears[0])}"
                    f" ({linears[0].name}) and {describe(source, linear)} ({linear.name}); a"
                    " modelopt checkpoint has one; use --format compressed-tensors"
                )
        _check_exclusions(source)
        check_cache(source, "a modelopt")

    def warnings(self, source: Source) -> list[str]:
        return [_TIED] if source.spec.tied_embeddings else []

    def label(self, source: Source) -> str:
        return f"modelopt {_only_algorithm(source)}"

    def linear(self, source: Source, linear: Linear) -> Tensors:
        scale, stored = source.weight_scale(linear), {"weight": weight(source, linear)}
        tensors: Tensors = dict(stored)
        match _algorithm(source, linear):
            case "NVFP4":
                shared = source.weight_global_scale(linear)
                assert shared is not None
                tensors["weight_scale"] = e4m3(scale)
                tensors["weight_scale_2"] = float32(shared, ())
                tensors["input_scale"] = float32(source.input_global_scale(linear), ())
            case "FP8":
                tensors["weight_scale"] = float32(scale, ())
                tensors["input_scale"] = float32(source.input_scale(linear), ())
            case "FP8_PB_WO":
                tensors["weight_scale"] = float32(scale, (scale.shape[0], 1, scale.shape[1], 1))
            case _:
                tensors["weight_scale"] = float32(scale, (len(scale),))
        return {f"{linear.name}.{name}": tensor for name, tensor in tensors.items()}

    def cache_scale_name(self, attention: str, which: CacheScale, fused: bool) -> str:
        if fused or which == "q":  # ModelOpt itself has no scale of queries
            return f"{attention}.{which}_scale"
        return f"{attention}.{which}_proj.{which}_scale"

    def config(self, source: Source) -> dict[str, Any]:
        algorithm = _only_algorithm(source)
        described: dict[str, Any] = {
            "quant_method": "modelopt",
            "quant_algo": algorithm,
            "ignore": _excluded(source),
            "kv_cache_scheme": dict(_E4M3_CACHE) if source.kv_cache == "e4m3" else None,
            "producer": _PRODUCER,
        }
        if algorithm in ("FP8", "NVFP4"):
            described["config_groups"] = {"group_0": _group(algorithm)}
        if algorithm == "NVFP4":
            described["group_size"] = 16
        return described

    def side_files(self, source: Source) -> Mapping[str, str]:
        """Returns `hf_quant_config.json`: the same facts in ModelOpt's older schema."""
        algorithm = _only_algorithm(source)
        quantization: dict[str, Any] = {
            "quant_algo": algorithm,
            "kv_cache_quant_algo": "FP8" if source.kv_cache == "e4m3" else None,
            "exclude_modules": _excluded(source),
        }
        if algorithm == "NVFP4":
            quantization["group_size"] = 16
        content = {"producer": _PRODUCER, "quantization": quantization}
        return {QUANT_CONFIG_FILE: json.dumps(content, indent=2) + "\n"}


def _algorithm(source: Source, linear: Linear) -> str | None:
    weights, inputs = source.quantized_schemes(linear)
    if weights.kind != inputs.kind:
        return None
    return _ALGORITHMS.get((weights.kind, weights.granularity, inputs.granularity))


def _only_algorithm(source: Source) -> str:
    found = _algorithm(source, next(iter(source.quantized_linears().values())))
    assert found is not None
    return found


def _excluded(source: Source) -> list[str]:
    """Lists modules in full precision, with one pattern for a layer's experts."""
    found: dict[str, None] = {}
    for module in kept(source):
        experts, inside, _ = module.partition(".experts.")
        found[f"{experts}.experts.*" if inside else module] = None
    return list(found)


def _check_exclusions(source: Source) -> None:
    """Raises UnsupportedError if an excluded name is part of a quantized linear's name.

    vLLM excludes every module whose name contains an excluded one.
    """
    excluded = _excluded(source)
    for linear in source.quantized_linears():
        for name in excluded:
            if name in linear:
                raise UnsupportedError(
                    f"{name} stays in full precision, and vLLM would take {linear} for a part of"
                    " it; use --format compressed-tensors"
                )


def _group(algorithm: str) -> dict[str, Any]:
    scheme: dict[str, Any] = {"dynamic": False, "num_bits": 8, "type": "float"}
    if algorithm == "NVFP4":
        scheme |= {"num_bits": 4, "group_size": 16}
    return {"input_activations": scheme, "weights": scheme, "targets": ["Linear"]}
