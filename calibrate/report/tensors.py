"""Describes each observed tensor under a recipe, as far as its histogram allows.

A histogram is a marginal distribution: for a static scale it gives the error on the samples
exactly. If scales are computed at run time from a token's or a group's own values, the error
depends on which values occur together. It is then None, unless it was measured with the model
(`sensitivity`). One bound remains: no run-time scale exceeds the one that fits the tensor's largest
value, so no more elements become zero than under that scale.
"""

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibrate.observe.histogram import SMALL, CodeDtype, Histogram, magnitudes
from calibrate.scales.activations import METHODS, Quality, find_scale, measure
from calibrate.scales.tensor_scheme import ObservedScheme, scheme_of
from octet.artifacts.calibration import Observation
from octet.hardware.cores import usable_cores
from octet.recipe import Recipe, ScaleMethod

__all__ = [
    "STEPS",
    "TensorReport",
    "distribution",
    "layer_of",
    "report_tensors",
    "role_of",
]

STEPS = 8  # bins per octave of a plotted distribution
_THREADS = 4

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True)
class TensorReport:
    """One observed tensor.

    `format` is that of its elements when served ("bfloat16": full precision). `methods` gives the
    quality of one static scale for the whole tensor, for each method; `chosen` that of the stored
    scale, None if none is stored. `global_scale` is the stored one of a two-level scheme.

    `small_sqnr_db` is the SQNR of the smallest 90 % of the non-zero elements under the stored
    scale, or else under `max`. `small_alone_db` is their SQNR under a scale of their own. Compare
    the two: a few large values can dominate the SQNR of the whole tensor and hide that the others
    are lost. `measured_sqnr_db` and `measured_small_sqnr_db` were measured by running the model.
    """

    kind: str
    layer: int | None
    expert: int | None
    role: str
    consumers: tuple[str, ...]
    format: str
    treatment: str
    granularity: str | None
    dynamic: bool
    elements: int
    zeros: float
    absmax: float
    quantiles: dict[str, float]
    methods: dict[ScaleMethod, Quality]
    chosen: Quality | None
    small_sqnr_db: float | None
    small_alone_db: float | None
    global_scale: float | None = None
    measured_sqnr_db: float | None = None
    measured_small_sqnr_db: float | None = None

    @property
    def quantized(self) -> bool:
        return self.chosen is not None or bool(self.methods)

    @property
    def sqnr_db(self) -> float | None:
        """SQNR as served: exact, measured, or None if not known."""
        return self.measured_sqnr_db if self.chosen is None else self.chosen.sqnr_db

    @property
    def underflow_at_most(self) -> float | None:
        """Upper bound of the fraction that becomes zero; None if it is known or has no bound."""
        if self.chosen is not None or "max" not in self.methods:
            return None
        return self.methods["max"].underflow

    @property
    def small_lost_db(self) -> float | None:
        """Amount by which large values lower the SQNR of the small ones; None if not known."""
        small, alone = self.small_left_db, self.small_alone_db
        if small is None or alone is None:
            return None
        return 0.0 if small >= alone else alone - small

    @property
    def small_left_db(self) -> float | None:
        """SQNR of the small values as served: exact, measured, or that under `max`."""
        if self.chosen is None and self.measured_sqnr_db is not None:
            return self.measured_small_sqnr_db
        return self.small_sqnr_db


def report_tensors(
    recipe: Recipe,
    observations: Mapping[str, Observation],
    histograms: Mapping[str, Histogram],
    chosen: Mapping[str, float],
    *,
    global_scales: Mapping[str, float] | None = None,
    sensitivity: Mapping[str, Any] | None = None,
) -> dict[str, TensorReport]:
    """Reports on every observed tensor.

    `chosen` and `global_scales` are the stored scales, by observation; `sensitivity` is JSON. Tries
    all methods on each tensor, with two exceptions that get only `max` and the recipe's own method:
    activations scaled in groups, because no single scale resembles those, and activations of
    experts, because there may be thousands.
    """
    measured = {
        linear: unit for unit in (sensitivity or {}).get("units", ()) for linear in unit["linears"]
    }

    def report(name: str) -> TensorReport:
        observation = observations[name]
        return _report(
            name,
            observation,
            scheme_of(recipe, observation),
            histograms[name],
            chosen.get(name),
            (global_scales or {}).get(name),
            measured.get(observation.consumers[0], {}) if observation.kind == "input" else {},
        )

    # Half of each search runs without the interpreter's lock: more threads would wait for it, and
    # keep it from the one that feeds the GPU meanwhile.
    with ThreadPoolExecutor(min(_THREADS, usable_cores())) as pool:
        return dict(zip(observations, pool.map(report, observations), strict=True))


def distribution(histogram: Histogram) -> dict[str, Any]:
    """Counts finite non-zero magnitudes in 8 bins per octave, starting at 2^(first/8)."""
    octaves = _octaves(histogram.code_dtype)
    present = np.flatnonzero(histogram.counts[: len(octaves)])
    present = present[present > 0]
    if not len(present):
        return {"first": 0, "counts": []}
    bins = octaves[present]
    first = int(bins[0])
    counts = np.zeros(int(bins[-1]) - first + 1, np.int64)
    np.add.at(counts, bins - first, histogram.counts[present])
    return {"first": first, "counts": counts.tolist()}


def layer_of(name: str) -> int | None:
    found = _LAYER.search(name)
    return int(found[1]) if found else None


def role_of(modules: Sequence[str]) -> str:
    """Returns the projections, such as "q/k/v" or "expert gate/up"."""
    short = "/".join(module.rpartition(".")[2].removesuffix("_proj") for module in modules)
    return f"expert {short}" if _EXPERT.search(modules[0]) else short


def _report(
    name: str,
    observation: Observation,
    treatment: ObservedScheme,
    histogram: Histogram,
    scale: float | None,
    global_scale: float | None,
    measured: Mapping[str, Any],
) -> TensorReport:
    fmt, scheme = treatment.format, treatment.scheme
    expert = _EXPERT.search(name)
    methods: dict[ScaleMethod, Quality] = {}
    quality = small = alone = None
    if fmt is not None:
        own = scheme.method if scheme is not None else "max"
        grouped = scheme is not None and scheme.granularity == "group"
        tried = ("max", own) if expert or grouped else METHODS
        percentile = 99.99 if scheme is None else scheme.percentile
        for method in dict.fromkeys(m for m in tried if m in METHODS):
            found = find_scale(histogram, fmt, method, percentile=percentile)
            methods[method] = measure(histogram, fmt, found)
        if scale is not None:
            quality = measure(histogram, fmt, scale)
        used = quality or methods["max"]
        smallest = _smallest(histogram)
        small = measure(smallest, fmt, used.scale).sqnr_db
        alone = measure(smallest, fmt, find_scale(smallest, fmt, "max")).sqnr_db
    full = "float16" if treatment.kv_cache else "bfloat16"
    return TensorReport(
        kind=observation.kind,
        layer=layer_of(name),
        expert=int(expert[1]) if expert else None,
        role=role_of(observation.consumers) if observation.kind == "input" else observation.kind,
        consumers=observation.consumers,
        format=full if fmt is None else fmt.name,
        treatment=str(treatment),
        granularity=None if scheme is None else scheme.granularity,
        dynamic=fmt is not None and not treatment.static,
        elements=histogram.total,
        zeros=histogram.zeros / max(1, histogram.total),
        absmax=histogram.absmax,
        quantiles={str(q): histogram.quantile(q) for q in (0.5, SMALL, 0.999)},
        methods=methods,
        chosen=quality,
        small_sqnr_db=small,
        small_alone_db=alone,
        global_scale=global_scale,
        measured_sqnr_db=None if fmt is None else measured.get("input_sqnr_db"),
        measured_small_sqnr_db=None if fmt is None else measured.get("input_small_sqnr_db"),
    )


def _smallest(histogram: Histogram) -> Histogram:
    """Returns the histogram of the small elements, without zeros."""
    counts = histogram.counts.copy()
    counts[0] = 0
    counts[magnitudes(histogram.code_dtype) > histogram.small_limit()] = 0
    return Histogram(counts, histogram.code_dtype)


@cache
def _octaves(code_dtype: CodeDtype) -> NDArray[np.int64]:
    """Returns the bin of each finite code, int64 [n]; code 0, zero, has no bin (0 here)."""
    values = magnitudes(code_dtype)
    finite = values[np.isfinite(values)].astype(np.float64)
    finite[0] = 1.0
    octaves: NDArray[np.int64] = np.floor(np.log2(finite) * STEPS).astype(np.int64)
    return octaves
