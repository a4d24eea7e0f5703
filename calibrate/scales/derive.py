"""Derives the scales of a recipe from weights and histograms; `real = stored * scale`."""

import os
import platform
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from calibrate.decoder.weights import LayerWeights
from calibrate.journal.distributed import Group
from calibrate.observe.histogram import Histogram
from calibrate.scales.activations import find_scale, measure
from calibrate.scales.weights import WeightScale, weight_scales
from octet.artifacts.calibration import Observation
from octet.errors import NumericsError
from octet.hardware.cores import usable_cores
from octet.model.checkpoint import Checkpoint
from octet.model.spec import Linear
from octet.numerics import formats, microscaling, scaling
from octet.numerics.scaling import Granularity
from octet.progress import progress_bar
from octet.recipe import KvCacheDtype, Recipe, TensorScheme
from octet.storage.tensors import Tensor, TensorFile

__all__ = [
    "Quantization",
    "WeightScale",
    "check_alive",
    "check_finite",
    "derive_scales",
    "input_scales",
    "kv_scale",
    "kv_scales",
    "replace_scales",
    "scales_in_use",
    "weight_scales",
]

Float32Array = NDArray[np.float32]

# A cache scale other than 1 must improve SQNR by this much over 1, in dB: E5M2's range holds any
# normal key or value unscaled, and not every engine applies a scale to an E5M2 cache.
_WORTH_A_SCALE_DB = 1.0

_FP8_CACHES: tuple[KvCacheDtype, ...] = ("e5m2", "e4m3")

# Codes of infinity; those of NaN are larger, and those of finite values smaller, without the sign.
_INFINITY = {"BF16": ("u2", 0x7F80), "F16": ("u2", 0x7C00), "F32": ("u4", 0x7F800000)}

# Suffix of the scale in use, by kind of observation.
_SUFFIXES = {
    "input": "input_scale",
    "key": "k_scale",
    "value": "v_scale",
    "query": "q_scale_e4m3",
}


@dataclass(frozen=True)
class Quantization:
    """A recipe applied to an observed checkpoint.

    `histograms` are by observation. `scales` are by their name in `Calibration`; `weights` hold the
    details of each weight's scale, by linear. Measurements do not round the inputs of linears whose
    schemes are `weight_only` (`octet.hardware.support.pattern_of`).
    """

    checkpoint: Checkpoint
    recipe: Recipe
    histograms: Mapping[str, Histogram]
    scales: dict[str, Float32Array]
    weights: dict[str, WeightScale]
    weight_only: tuple[str, ...] = ()

    def with_cache(self, kv_cache: KvCacheDtype) -> Self:
        """Returns the same weights and activations with another cache and its scales."""
        recipe = self.recipe.model_copy(update={"kv_cache": kv_cache})
        scales = self.scales | kv_scales(self.checkpoint, recipe, self.histograms)
        return replace(self, recipe=recipe, scales=scales)


def derive_scales(
    checkpoint: Checkpoint,
    recipe: Recipe,
    histograms: Mapping[str, Histogram],
    fitted: Mapping[str, Float32Array] | None = None,
    layers: LayerWeights | None = None,
    console: Console | None = None,
    weight_only: tuple[str, ...] = (),
) -> Quantization:
    """Derives every scale of the recipe, except `fitted` ones, to which the weights were fitted.

    `histograms` are by observation; their mean squares, if they have any, weight the errors of
    4-bit weights. `weight_only` is that of the result. The model does not run. Each weight is read
    once or twice, or not at all if the GPU of `layers`, which are the checkpoint's, holds it.
    Raises NumericsError for a weight that holds NaN or Inf, and ConfigError for a pattern that
    matches nothing; both name it.
    """
    recipe.check_patterns(checkpoint.spec.linear_names)

    def found() -> dict[str, WeightScale]:
        held = (lambda name: None) if layers is None else layers.weight
        quantized = [name for name in checkpoint.spec.linear_names if recipe.scheme_of(name)]
        weights = {}
        with progress_bar(console, "Scales", len(quantized), "linears") as advance:
            for name, weight in weight_scales(
                checkpoint, recipe, held, lambda linear: _mean_squares(histograms, linear)
            ):
                weights[name] = weight
                advance(1)
        return weights

    weights = found() if layers is None else layers.run(found)
    scales = {f"{name}.weight_scale": weight.scale for name, weight in weights.items()}
    scales |= {
        f"{name}.weight_global_scale": weight.global_scale
        for name, weight in weights.items()
        if weight.global_scale is not None
    }
    scales |= input_scales(checkpoint, recipe, histograms)
    scales |= kv_scales(checkpoint, recipe, histograms)
    fitted = fitted or {}
    scales |= {name: scale for name, scale in fitted.items() if name in scales}
    for name in weights:
        if f"{name}.weight_scale" in fitted:
            weights[name] = _fitted_weight(checkpoint, recipe, name, scales)
    return Quantization(checkpoint, recipe, histograms, scales, weights, weight_only)


def _mean_squares(
    histograms: Mapping[str, Histogram], linear: Linear
) -> NDArray[np.float32] | None:
    histogram = histograms.get(linear.input)
    return None if histogram is None else histogram.mean_squares


def _fitted_weight(
    checkpoint: Checkpoint, recipe: Recipe, name: str, scales: Mapping[str, Float32Array]
) -> WeightScale:
    """Compares the quantized weight with the unchanged checkpoint's.

    Compared with the fitted weight, already on the grid of its scales, there would be no error.
    """
    schemes = recipe.scheme_of(name)
    assert schemes is not None  # it has a scale
    scheme = schemes[0]
    scale, shared = scales[f"{name}.weight_scale"], scales.get(f"{name}.weight_global_scale")
    weight = checkpoint.unchanged().read(f"{name}.weight").float32()
    noise = weight - scaling.fake_quantize(
        checkpoint.read(f"{name}.weight").float32(),
        microscaling.combined(scale, shared),
        formats.format_named(scheme.format),
        Granularity.of(scheme.granularity, scheme.group_size),
    )
    power, error = (float(np.square(x, dtype=np.float64).sum()) for x in (weight, noise))
    sqnr_db = 10 * np.log10(power / error) if error > 0 else np.inf
    return WeightScale(scale, scheme.format, float(sqnr_db), shared)


def check_finite(
    checkpoint: Checkpoint, console: Console | None = None, group: Group | None = None
) -> None:
    """Raises NumericsError, naming the tensor, if one of the checkpoint's own holds NaN or Inf.

    Reads each file once, and hashes it meanwhile: `checkpoint.weight_hashes` need not read it. The
    ranks of `group` that see the same files, on one machine, share them.
    """
    group = group or Group()
    shards = checkpoint.shards
    mine = range(len(shards))
    if group.world > 1 and len(set(group.gather(_identity_of_files(checkpoint)))) == 1:
        mine = mine[group.rank :: group.world]
    bad = group.attempt(lambda: _scan([shards[number] for number in mine], console))
    for others, digests in group.gather((bad, {number: shards[number].digests for number in mine})):
        bad |= others
        for number, known in digests.items():
            shards[number].digests = known

    def refuse() -> None:
        for name in checkpoint.tensor_names:
            if name in bad:
                scaling.absmax(checkpoint.read(name).float32(), scaling.TENSOR, name=name)

    group.attempt(refuse)


def _scan(shards: Sequence[TensorFile], console: Console | None) -> set[str]:
    """Reads files once, and hashes them; returns the names of tensors that hold NaN or Inf."""
    bad: set[str] = set()
    stopped = threading.Event()

    def inspect(name: str, part: Tensor) -> None:
        if stopped.is_set():
            raise InterruptedError
        if not _is_finite(part):
            bad.add(name)

    size = sum(len(shard.contents) for shard in shards)
    with (
        progress_bar(console, "Reading weights", size, "bytes") as advance,
        ThreadPoolExecutor(usable_cores()) as pool,
    ):
        try:
            list(pool.map(lambda shard: shard.scan(inspect, advance), shards))
        except BaseException:  # Ctrl-C: the pool waits for its threads
            stopped.set()
            raise
    return bad


def _identity_of_files(checkpoint: Checkpoint) -> str:
    """Returns what is equal on two ranks only if they read the same files."""
    found = [os.stat(shard.path) for shard in checkpoint.shards]
    files = [(x.st_dev, x.st_ino, x.st_size, x.st_mtime_ns) for x in found]
    return repr((platform.node(), files))


def check_alive(
    checkpoint: Checkpoint, recipe: Recipe, histograms: Mapping[str, Histogram]
) -> None:
    """Raises NumericsError, naming the linear, if a quantized one only ever had zeros as input."""
    for linear in checkpoint.spec.linears():
        if recipe.scheme_of(linear.name) is None:
            continue
        histogram = histograms[linear.input]
        if histogram.total == histogram.zeros:
            raise NumericsError(
                f"the input of {linear.name} was zero in all {histogram.total:,} elements that were"
                " seen: what comes before it is dead. Check the checkpoint, or leave the layer in"
                f" full precision with --exclude {linear.name} (what was computed is kept)"
            )


def input_scales(
    checkpoint: Checkpoint, recipe: Recipe, histograms: Mapping[str, Histogram]
) -> dict[str, Float32Array]:
    """Derives the stored activation scales of each quantized linear from its histogram.

    `<linear>.input_scale` [] if the scheme is static; `<linear>.input_global_scale` [],
    amax / (448 * 6), if it is dynamic with two levels; none otherwise.
    """
    found: dict[tuple[str, TensorScheme], Float32Array] = {}
    scales = {}
    for linear in checkpoint.spec.linears():
        schemes = recipe.scheme_of(linear.name)
        if schemes is None:
            continue
        scheme = schemes[1]
        if scheme.dynamic and not scheme.two_level:
            continue
        key = (linear.input, scheme)
        if key not in found:
            found[key] = _input_scale(histograms[linear.input], scheme)
        kind = "input_global_scale" if scheme.two_level else "input_scale"
        scales[f"{linear.name}.{kind}"] = found[key]
    return scales


def kv_scale(histogram: Histogram, kv_cache: KvCacheDtype) -> float:
    """Derives the scale of one layer's keys or values in the cache.

    - e4m3: amax / 448.
    - e5m2: 1.0, with two exceptions. If amax is above 57,344, it is amax / 57,344, so that nothing
      saturates. If the values are so small that 1.0 costs over 1 dB of SQNR by underflow, it is the
      power of two just above amax / 57,344, which changes no mantissa.
    - float16: 1.0.
    """
    if kv_cache == "float16":
        return 1.0
    if kv_cache == "e4m3":
        return find_scale(histogram, formats.E4M3, "max")
    largest = find_scale(histogram, formats.E5M2, "max")
    if histogram.absmax > formats.E5M2.max:
        return largest
    power = float(2.0 ** np.ceil(np.log2(largest)))
    gain = measure(histogram, formats.E5M2, power).sqnr_db
    gain -= measure(histogram, formats.E5M2, 1.0).sqnr_db
    return power if gain > _WORTH_A_SCALE_DB else 1.0  # NaN, from two infinities, is no gain


def kv_scales(
    checkpoint: Checkpoint, recipe: Recipe, histograms: Mapping[str, Histogram]
) -> dict[str, Float32Array]:
    """Derives the cache scales of every layer.

    `<layer>.self_attn.k_scale` and `.v_scale` [] are for the recipe's cache; `.k_scale_e4m3`,
    `.v_scale_e5m2` and so on are for each FP8 cache that an export may choose. If queries were
    observed, adds `.q_scale_e4m3`: attention in E4M3 rounds them.
    """
    scales = {}
    for index in range(checkpoint.spec.layers):
        attention = f"{checkpoint.spec.layer(index)}.self_attn"
        for letter, observed in (("k", "key"), ("v", "value")):
            histogram = histograms[f"{attention}.{observed}"]
            found = {cache: kv_scale(histogram, cache) for cache in _FP8_CACHES}
            own = found.get(recipe.kv_cache, 1.0)
            scales[f"{attention}.{letter}_scale"] = np.asarray(own, np.float32)
            for cache, scale in found.items():
                scales[f"{attention}.{letter}_scale_{cache}"] = np.asarray(scale, np.float32)
        if f"{attention}.query" in histograms:
            query = kv_scale(histograms[f"{attention}.query"], "e4m3")
            scales[f"{attention}.q_scale_e4m3"] = np.asarray(query, np.float32)
    return scales


def scales_in_use(
    observations: Mapping[str, Observation], scales: Mapping[str, Float32Array]
) -> dict[str, float]:
    """Returns the static scale of each observed tensor that has one, by observation.

    Global scales do not count: the tensor's elements are quantized with their groups' scales.
    """
    used = {}
    for name, observation in observations.items():
        for key in _keys(observation):
            if key in scales:
                used[name] = float(scales[key])
    return used


def replace_scales(
    observations: Mapping[str, Observation],
    scales: Mapping[str, Float32Array],
    used: Mapping[str, float],
) -> dict[str, Float32Array]:
    """Returns `scales` with those in use replaced by `used`, by observation."""
    keys = {key: scale for name, scale in used.items() for key in _keys(observations[name])}
    new = {key: np.asarray(scale, np.float32) for key, scale in keys.items() if key in scales}
    return {**scales, **new}


def _keys(observation: Observation) -> list[str]:
    """Returns the names under which the static scale of an observed tensor is stored, if any."""
    suffix = _SUFFIXES[observation.kind]
    return [f"{consumer}.{suffix}" for consumer in observation.consumers]


def _is_finite(part: Tensor) -> bool:
    if part.dtype not in _INFINITY:
        return bool(np.isfinite(part.float32()).all())
    unsigned, infinity = _INFINITY[part.dtype]
    magnitude = np.iinfo(unsigned).max >> 1
    return int((part.codes.view(unsigned) & magnitude).max()) < infinity


def _input_scale(histogram: Histogram, scheme: TensorScheme) -> Float32Array:
    fmt = formats.format_named(scheme.format)
    if scheme.two_level:
        return microscaling.global_scale(histogram.absmax, fmt)
    scale = find_scale(
        histogram, fmt, scheme.method, percentile=scheme.percentile, margin=scheme.margin
    )
    return np.asarray(scale, np.float32)
