"""Selects the simulated paths that conform to a backend's declared configuration.

The hardware model (`octet.hardware.support`) knows how each engine rounds on each device. A path
conforms if the declared engine takes it on the declared device, in any version and with any
attention backend that serves the cache. If the model knows nothing about the combination, every
path with these weights and this cache conforms, and the label says so.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from octet.artifacts.scenarios import ScenarioSet
from octet.artifacts.serving_path import ServingPath
from octet.errors import UnsupportedError
from octet.hardware.devices import Device, devices
from octet.hardware.support import ENGINES, EngineName, Pair, numerics, pattern_of, support
from octet.recipe import KvCacheDtype, Recipe

__all__ = ["Declared", "Engine", "declared_paths", "vllm_path"]

Engine = Literal["vllm-gpu", "vllm-cpu", "tensorrt", "onnxruntime"]
_NAMES: dict[Engine, EngineName] = {
    "vllm-gpu": "vllm",
    "vllm-cpu": "vllm",
    "tensorrt": "tensorrt",
    "onnxruntime": "onnxruntime",
}
_ASSUMED = (9, 0)  # the lowest compute capability of a GPU that is declared without its name


@dataclass(frozen=True)
class Declared:
    """The declared configuration of a backend."""

    paths: tuple[ServingPath, ...]  # any of them conforms; empty: none was simulated
    label: str  # for example "fp8 weights, e5m2 cache, vllm-cpu"
    kv_cache: KvCacheDtype | None = None
    weights: Literal["quantized", "original"] = "quantized"
    engine: Engine | None = None  # None: any
    device: Device | None = None  # None: any that the engine runs on

    def rounding(self, activations: Literal["quantized", "original"]) -> "Declared":
        """Returns this with the activations of quantized linear layers in one way alone.

        "original" is weight-only. Layers that are not quantized have no other way.
        """
        if self.weights == "original":
            return self
        rounded = activations == "quantized"
        paths = tuple(path for path in self.paths if path.activations == rounded)
        how = "activations rounded" if rounded else "weight-only"
        return replace(self, paths=paths, label=f"{self.label}, {how}")


def declared_paths(
    scenarios: ScenarioSet | None,
    recipe: Recipe,
    kv_cache: KvCacheDtype,
    *,
    weights: Literal["quantized", "original"] = "quantized",
    engine: Engine | None = None,
    device: Device | None = None,
) -> Declared:
    """Returns the simulated paths with these weights and this cache that `engine` takes.

    `engine` None stands for any engine; with `device` None too, every such path conforms. `device`
    None with an engine stands for any GPU of compute capability 9.0 or later, or any CPU. Real
    kernels lie between a path's float32 and its bfloat16, so both conform.
    """
    quantized = weights == "quantized"
    found = [
        path
        for path in (scenarios.paths if scenarios is not None else ())
        if path.kv_cache == kv_cache
        and path.weights == quantized
        and (not path.power_scales or _has_deep_gemm(engine, device))
    ]
    name = f"{recipe.name} weights" if quantized else "original weights"
    cache = "16-bit" if kv_cache == "float16" else kv_cache
    label = f"{name}, {cache} cache" + (f", {engine}" if engine else "")
    label += f" on {device.name}" if device else ""
    if engine is not None or device is not None:
        pair = (recipe.weights, recipe.activations) if quantized else None
        taken = set(_known_paths(pair, kv_cache, engine, device))
        if taken:
            found = [path for path in found if _as_known(path) in taken]
        else:
            label += " (how that rounds is not known: any way conforms)"
    return Declared(tuple(found), label, kv_cache, weights, engine, device)


def vllm_path(
    pair: Pair | None,
    kv_cache: KvCacheDtype,
    device: Device,
    version: str,
    *,
    attention: str | None = None,
) -> ServingPath:
    """Returns the path that vLLM takes for linears of the schemes `pair`.

    `pair` None: all linears in full precision. `kv_cache` "float16" is vLLM's `auto`. `attention`
    is the attention backend; by default the one that vLLM selects. Raises UnsupportedError if the
    hardware model does not know that it runs.
    """
    found = support(device, "vllm", version, pair, kv_cache, attention)
    if not found.runs or found.activations is None or found.rounding is None:
        reason = found.message or "not known"
        raise UnsupportedError(
            f"vLLM {version} on {device.name}, {pattern_of(pair)} weights, {kv_cache} cache:"
            f" {found.outcome} ({reason})"
        )
    return ServingPath(
        weights=pair is not None,
        activations=found.activations,
        kv_cache=kv_cache,
        kv_rounding=found.rounding,
        queries=bool(found.queries),
    )


def _known_paths(
    pair: Pair | None, kv_cache: KvCacheDtype, engine: Engine | None, device: Device | None
) -> Iterator[ServingPath]:
    """Yields the paths that the hardware model knows, without their compute dtype."""
    names = ENGINES if engine is None else (_NAMES[engine],)
    for name in names:
        for each in (device,) if device is not None else _assumed(engine):
            for way in numerics(each, name, None, pair, kv_cache):
                yield ServingPath(
                    weights=pair is not None,
                    activations=way.activations,
                    kv_cache=kv_cache,
                    kv_rounding=way.rounding,
                    queries=way.queries,
                )


def _assumed(engine: Engine | None) -> Sequence[Device]:
    """Returns the devices that an engine may run on if none is declared."""
    if engine in ("vllm-cpu", "onnxruntime"):
        return [device for device in devices() if device.vendor == "cpu"]
    gpus = [device for device in devices() if (device.compute or (0, 0)) >= _ASSUMED]
    return list({device.capability: device for device in gpus}.values())


def _has_deep_gemm(engine: Engine | None, device: Device | None) -> bool:
    """Returns True if vLLM may round scales of FP8 blocks there, as it does for DeepGEMM.

    Whether it does depends on its environment variables.
    """
    compute = _ASSUMED if device is None else device.compute or (0, 0)
    return engine in (None, "vllm-gpu") and compute >= _ASSUMED


def _as_known(path: ServingPath) -> ServingPath:
    """Returns `path` with only what the hardware model knows, for comparison."""
    return path.model_copy(update={"compute": "bfloat16", "power_scales": False})
