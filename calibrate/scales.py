"""From weights and histograms to the scales of a recipe; `real = stored * scale` throughout."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibrate.histogram import Histogram
from calibrate.search import find_scale, measure
from octet import formats, scaling
from octet.calibration import Observation
from octet.checkpoint import Checkpoint
from octet.errors import ConfigError
from octet.model import Linear
from octet.recipe import KvCacheDtype, Recipe, TensorScheme
from octet.scaling import Granularity

__all__ = [
    "WeightScale",
    "check_finite",
    "check_recipe",
    "input_scales",
    "kv_scale",
    "kv_scales",
    "scales_in_use",
    "weight_scales",
]

Float32Array = NDArray[np.float32]

# Multiples of the absmax scale that `mse` tries for weights, 16 an octave: the grid's phase repeats
# every octave, and a weight's distribution has no tail worth clipping by more than half.
_MULTIPLES = tuple(2.0 ** (-step / 16) for step in range(-15, 17))

# A cache scale other than 1 must gain this much over it, in dB: E5M2's range holds any normal key
# or value as it is, and not every engine applies a scale to an E5M2 cache.
_WORTH_A_SCALE_DB = 1.0


@dataclass(frozen=True)
class WeightScale:
    """The scale of one linear's weight, in the shape of the recipe's granularity, and its SQNR."""

    scale: Float32Array
    format: str
    sqnr_db: float


def check_recipe(recipe: Recipe) -> None:
    """ConfigError for what a recipe may say but this stage cannot do; call before the work."""
    if recipe.weights.method not in ("max", "mse"):
        raise ConfigError(
            f"recipe {recipe.name}: weights.method '{recipe.weights.method}' is for activations;"
            " weights take max or mse"
        )
    if recipe.kv_cache == "e4m3":
        raise ConfigError(
            f"recipe {recipe.name}: no export writes kv_cache e4m3 yet; use e5m2 or float16"
        )


def check_finite(checkpoint: Checkpoint, *, except_for: Iterable[str]) -> None:
    """NumericsError naming a tensor that holds NaN or Inf; linears in `except_for` are skipped."""
    checked = {f"{linear}.weight" for linear in except_for}
    for name in checkpoint.tensor_names:
        if name not in checked:
            scaling.absmax(checkpoint.read(name).float32(), scaling.TENSOR, name=name)


def weight_scales(checkpoint: Checkpoint, recipe: Recipe) -> Iterator[tuple[str, WeightScale]]:
    """Each quantized linear's name and scale; NumericsError names a weight that holds NaN or Inf.

    Per-tensor scales are shared by linears that are fused when served (q/k/v, gate/up).
    """
    granularity = Granularity.of(recipe.weights.granularity, recipe.weights.group_size)
    groups: dict[str, list[Linear]] = {}
    for linear in checkpoint.spec.linears():
        if not recipe.excludes(linear.name):
            shared = linear.input if granularity == scaling.TENSOR else linear.name
            groups.setdefault(shared, []).append(linear)
    for group in groups.values():
        weights = [checkpoint.read(f"{linear.name}.weight").float32() for linear in group]
        amax = np.stack(
            [
                scaling.absmax(weight, granularity, name=f"{linear.name}.weight")
                for weight, linear in zip(weights, group, strict=True)
            ]
        ).max(axis=0)
        scale = _weight_scale(weights, amax, recipe.weights, granularity)
        for linear, weight in zip(group, weights, strict=True):
            sqnr_db = _sqnr_db(weight, scale, recipe.weights, granularity)
            yield linear.name, WeightScale(scale, recipe.weights.format, sqnr_db)


def input_scales(
    checkpoint: Checkpoint, recipe: Recipe, histograms: Mapping[str, Histogram]
) -> dict[str, Float32Array]:
    """`<linear>.input_scale` [] of each quantized linear, if the recipe's are static."""
    scheme = recipe.activations
    if scheme.dynamic:
        return {}
    fmt = formats.format_named(scheme.format)
    found: dict[str, float] = {}
    scales = {}
    for linear in checkpoint.spec.linears():
        if recipe.excludes(linear.name):
            continue
        if linear.input not in found:
            found[linear.input] = find_scale(
                histograms[linear.input], fmt, scheme.method, percentile=scheme.percentile
            )
        scales[f"{linear.name}.input_scale"] = np.asarray(found[linear.input], np.float32)
    return scales


def kv_scale(histogram: Histogram, kv_cache: KvCacheDtype) -> float:
    """The scale of one layer's keys or values in the cache.

    - e4m3: amax / 448.
    - e5m2: 1.0, unless amax is above 57,344 (then amax / 57,344, so that nothing saturates), or the
      values are so small that 1.0 costs over 1 dB of SQNR by underflow; then the power of two just
      above amax / 57,344, which changes no mantissa.
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
    """`<layer>.self_attn.k_scale` and `.v_scale` [] of every layer."""
    scales = {}
    for index in range(checkpoint.spec.layers):
        attention = f"{checkpoint.spec.layer(index)}.self_attn"
        for scale, observed in (("k_scale", "key"), ("v_scale", "value")):
            found = kv_scale(histograms[f"{attention}.{observed}"], recipe.kv_cache)
            scales[f"{attention}.{scale}"] = np.asarray(found, np.float32)
    return scales


def scales_in_use(
    observations: Mapping[str, Observation], scales: Mapping[str, Float32Array]
) -> dict[str, float]:
    """The static scale of each observed tensor that has one, by observation."""
    used = {}
    for name, observation in observations.items():
        suffix = {"input": "input_scale", "key": "k_scale", "value": "v_scale"}[observation.kind]
        for consumer in observation.consumers:
            if f"{consumer}.{suffix}" in scales:
                used[name] = float(scales[f"{consumer}.{suffix}"])
    return used


def _weight_scale(
    weights: list[Float32Array], amax: Float32Array, scheme: TensorScheme, granularity: Granularity
) -> Float32Array:
    fmt = formats.format_named(scheme.format)
    largest = np.asarray(scaling.scale_from_absmax(amax, fmt), np.float32)
    if scheme.method == "max":
        return largest
    best, least = largest, np.full(largest.shape, np.inf)
    for multiple in _MULTIPLES:
        scale = np.asarray(largest * np.float32(multiple), np.float32)
        error = np.zeros(largest.shape)
        for weight in weights:
            noise = scaling.fake_quantize(weight, scale, fmt, granularity) - weight
            error += _tile_sums(noise.astype(np.float64) ** 2, granularity)
        best = np.where(error < least, scale, best)
        least = np.minimum(error, least)
    return best


def _tile_sums(x: NDArray[np.float64], granularity: Granularity) -> NDArray[np.float64]:
    """The sum over each tile of x [N, K], in the shape of the scales."""
    if granularity.rows is None:
        return np.asarray(x.sum())
    if granularity.rows > 1:
        x = np.add.reduceat(x, np.arange(0, x.shape[0], granularity.rows), axis=0)
    if granularity.columns is None:
        sums = x.sum(axis=1, keepdims=True)
    else:
        sums = np.add.reduceat(x, np.arange(0, x.shape[1], granularity.columns), axis=1)
    return np.asarray(sums)


def _sqnr_db(
    weight: Float32Array, scale: Float32Array, scheme: TensorScheme, granularity: Granularity
) -> float:
    fmt = formats.format_named(scheme.format)
    noise = scaling.fake_quantize(weight, scale, fmt, granularity) - weight
    signal, error = float(np.vdot(weight, weight)), float(np.vdot(noise, noise))
    return float(10 * np.log10(signal / error)) if error > 0 else float("inf")
