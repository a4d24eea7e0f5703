"""Reads the JSON of `octet bench`, and transfers its speeds to another load.

The ratio of a measured speed to the roofline hardly depends on the load. So the speed at another
load is its roofline times the mean of these ratios, weighted by how close the loads are.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from octet.errors import ConfigError
from octet.hardware.devices import Device, find_device
from octet.plan.roofline import Load, Roofline
from octet.recipe import KvCacheDtype
from octet.storage.files import read_object

__all__ = ["Basis", "Measurement", "estimate", "read_bench"]

# How a speed is known: this load was measured; larger and smaller loads were measured; only other
# loads were; nothing was, so it is the roofline, an upper bound.
Basis = Literal["measured", "interpolated", "extrapolated", "roofline"]


@dataclass(frozen=True)
class Measurement:
    """The output tokens per second of one recipe and cache under one load."""

    recipe: str | None  # None: not quantized
    kv_cache: KvCacheDtype
    tensor_parallel: int
    load: Load
    tokens_per_s: float


def read_bench(path: Path, device: Device) -> list[Measurement]:
    """Returns the measurements of the checkpoints that `octet bench` started on `device`.

    Raises ConfigError for another file, for measurements of another GPU, and if every target was a
    URL, of which the recipe is not known.
    """
    data = read_object(path, ConfigError)
    try:
        return _measurements(path, data, device)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        raise ConfigError(f"--bench {path}: not what `octet bench --json` prints") from None


def _measurements(path: Path, data: dict[str, Any], device: Device) -> list[Measurement]:
    served, loads, cells = data["served"], data["loads"], data["cells"]
    gpu = data["gpu"]
    if gpu is not None and find_device(gpu) != device:
        raise ConfigError(f"--bench {path}: measured on {gpu}, and --gpu is {device.name}")
    found = []
    for load, row in zip(loads, cells, strict=True):
        for target, cell in zip(served, row, strict=True):
            if target is not None:
                speed = float(cell["figures"]["tokens_per_s"]["median"])
                requests, prompt, output = map(int, load.split("x"))
                found.append(
                    Measurement(**target, load=Load(requests, prompt, output), tokens_per_s=speed)
                )
    if not found:
        raise ConfigError(
            f"--bench {path}: every target was a URL, whose recipe is not known; give"
            " `octet bench` checkpoints"
        )
    return found


def estimate(
    roofline: Roofline, load: Load, measurements: Sequence[Measurement]
) -> tuple[float | None, Basis]:
    """Returns the output tokens per second under `load`, and what they rest on.

    None if neither the GPU's figures nor a measurement of this very load are known.
    """
    recipe = roofline.sizes.recipe
    name = None if recipe is None else recipe.name
    wanted = (name, roofline.kv_cache, roofline.degree)
    own = [m for m in measurements if (m.recipe, m.kv_cache, m.tensor_parallel) == wanted]
    for measurement in own:
        if measurement.load == load:
            return measurement.tokens_per_s, "measured"
    bound = roofline.tokens_per_s(load)
    if bound is None or not own:
        return bound, "roofline"
    ratio = total = 0.0
    for measurement in own:
        reached = roofline.tokens_per_s(measurement.load)
        assert reached is not None  # as `bound`
        weight = 1 / _distance(load, measurement.load)
        ratio += weight * measurement.tokens_per_s / reached
        total += weight
    inside = all(
        min(values) <= wanted <= max(values)
        for wanted, values in (
            (load.requests, [m.load.requests for m in own]),
            (load.prompt, [m.load.prompt for m in own]),
        )
    )
    return bound * ratio / total, "interpolated" if inside else "extrapolated"


def _distance(one: Load, other: Load) -> float:
    """Returns a distance that counts factors: of the requests, the prompt and the output."""
    pairs = ((one.requests, other.requests), (one.prompt, other.prompt), (one.output, other.output))
    return math.sqrt(sum(math.log(a / b) ** 2 for a, b in pairs))
