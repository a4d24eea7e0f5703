"""Compares live histograms of activations with those of the calibration.

*Distribution.* A tensor's magnitudes are binned into cells with equal shares of the calibration's
counts, and one cell beyond its largest. Square roots of the shares, of all tensors joined, are a
point; the distance of two points is Hellinger's. Tokens of a prompt are not independent, but
windows of traffic nearly are, and so are the spans of samples that a calibration keeps apart. Their
scatter gives E, the expected squared noise of both means. The square of Gaussian noise of any
covariance exceeds t²·E with at most the probability that one squared normal exceeds t², for
t² > 1.54 (Székely and Bakirov, Probab. Theory Relat. Fields 126 (2003) 184). E is estimated, so t
is Student's. By the triangle inequality, the distance measured of traffic within a tolerance is
above tolerance + t · sqrt(E) with at most this probability. The tolerance is the distance caused by
serving in the recipe's formats, because a calibration counts activations that are not rounded.

*Error.* A histogram gives the exact error of a stored scale. A scale no longer fits if its error
is, with confidence, over `GAIN_DB` larger than that of a scale derived from the live counts.
Windows are the independent samples. The probability of a false alarm is divided between both rules,
and between the tensors of the second.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from calibrate.observe.histogram import CodeDtype, Histogram
from calibrate.scales.activations import effect
from calibrate.scales.derive import scales_in_use
from calibrate.scales.tensor_scheme import ObservedScheme, scheme_of
from octet.artifacts.calibration import Calibration
from octet.artifacts.live import LiveWindow
from octet.errors import ConfigError
from octet.recipe import Recipe
from octet.statistics import moments, student_ends, t_quantile

__all__ = ["GAIN_DB", "Drift", "TensorDrift", "compare_live"]

GAIN_DB = 1.0
_FEWEST_WINDOWS, _FEWEST_SPANS = 8, 3
# Distance between what a calibration counts and what the embedded engine does on the same text, of
# the example model: 0.0007 (fp8), 0.0025 (fp8-static), 0.005 (nvfp4), 0.010 (mxfp4). Rounded up.
_TOLERANCES = {"e4m3": 0.005, "e2m1": 0.015}
_CELLS = 16
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class TensorDrift:
    """One observed tensor, in the calibration ("then") and in live traffic ("now").

    `distance` is Hellinger's, 0 to 1. Errors are relative squared errors under the stored scale;
    `reachable` is the error now under a scale derived from the live counts. They and the shares are
    None for a tensor whose scale is not stored.
    """

    distance: float
    largest_then: float
    largest_now: float
    error_then: float | None = None
    error_now: float | None = None
    reachable: float | None = None
    saturated_then: float | None = None
    saturated_now: float | None = None
    underflow_then: float | None = None
    underflow_now: float | None = None
    misfit: bool = False  # the stored scale no longer fits

    def decibels(self, which: Literal["then", "now", "reachable"]) -> float | None:
        """Returns an error in dB below the tensor's power; None without a stored scale."""
        error = {"then": self.error_then, "now": self.error_now, "reachable": self.reachable}[which]
        if error is None:
            return None
        return -10 * math.log10(error) if error > 0 else math.inf

    @property
    def gain_db(self) -> float | None:
        """Decibels of error that a new scale would save; None without a stored scale."""
        if not self.error_now or not self.reachable:
            return None
        return 10 * math.log10(self.error_now / self.reachable)


@dataclass(frozen=True)
class Drift:
    """The comparison. The calibration no longer holds if `drifted`."""

    windows: int
    tokens: int  # number of live tokens that were counted
    began: float  # seconds since 1970
    ended: float
    false_alarms: float
    distance: float  # Hellinger distance of all tensors together
    noise: float  # part of the limit that falls with the number of tokens
    tolerance: float  # part of the limit that serving in the recipe's formats may take
    tensors: Mapping[str, TensorDrift]
    uncounted: tuple[str, ...]  # tensors of the calibration that were not counted

    @property
    def limit(self) -> float:
        """The distance above which the distribution has changed."""
        return self.tolerance + self.noise

    @property
    def changed(self) -> bool:
        """True if the distribution differs from the calibration's by more than the limit."""
        return self.distance > self.limit

    @property
    def misfits(self) -> list[str]:
        """The tensors whose stored scale no longer fits, worst first."""
        found = [name for name, tensor in self.tensors.items() if tensor.misfit]
        return sorted(found, key=lambda name: -(self.tensors[name].gain_db or 0))

    @property
    def drifted(self) -> bool:
        return self.changed or bool(self.misfits)

    def as_json(self) -> dict[str, Any]:
        known = asdict(self) | {"tensors": {}}
        known["uncounted"] = list(self.uncounted)
        for name, tensor in self.tensors.items():
            known["tensors"][name] = asdict(tensor) | {"gain_db": tensor.gain_db}
        return known | {
            "limit": self.limit,
            "changed": self.changed,
            "misfits": self.misfits,
            "drifted": self.drifted,
        }


@dataclass(frozen=True)
class _Parts:
    """Independent parts of a stream: `points` [parts, dimensions], and `tokens` [parts] of each.

    The squared distance of two points is the tensors' mean squared Hellinger distance.
    """

    points: Floats
    tokens: Floats

    @property
    def mean(self) -> Floats:
        return np.asarray(self.tokens @ self.points / self.tokens.sum())

    @property
    def noise(self) -> float:
        """Expected squared distance of the mean from that of infinitely many parts."""
        squares = np.square(self.points - self.mean).sum(axis=1)
        return float(self.tokens @ squares / (len(squares) - 1) / self.tokens.sum())

    @property
    def rank(self) -> float:
        """Number of directions in which parts scatter: (Σλ)²/Σλ² of their covariance."""
        scaled = (self.points - self.mean) * np.sqrt(self.tokens)[:, None]
        products = scaled @ scaled.T
        squares = float(np.square(products).sum())
        return float(np.trace(products)) ** 2 / squares if squares > 0 else 1.0


def compare_live(
    calibration: Calibration, windows: Sequence[LiveWindow], *, false_alarms: float = 0.001
) -> Drift:
    """Compares `windows` of live traffic with `calibration`.

    `false_alarms` is the chance of an alarm for traffic that is like the calibration's samples.
    Raises ConfigError if there are too few windows, or spans of samples in the calibration.
    """
    tokens = np.array([window.tokens for window in windows], np.float64)
    if len(windows) < _FEWEST_WINDOWS:
        raise ConfigError(
            f"{len(windows)} windows of live activations ({tokens.sum():,.0f} tokens) are too few"
            f" to judge, {_FEWEST_WINDOWS} are needed: wait, or let the server count more steps"
        )
    used = scales_in_use(calibration.observations, calibration.scales)
    level = 1 - false_alarms / 2 / max(1, len(used))  # confidence for the error of one tensor
    tensors: dict[str, TensorDrift] = {}
    points: list[tuple[Floats, Floats]] = []  # of each tensor: [spans, cells], [windows, cells]
    spans = np.zeros(1)
    for name, observation in calibration.observations.items():
        then = np.atleast_2d(calibration.chunks[name])
        now = np.stack([window.counts(name) for window in windows])
        if not then.any() or not now.any():
            continue
        edges = _edges(then.sum(axis=0))
        points.append((_embed(then, edges), _embed(now, edges)))
        weights = then.sum(axis=1).astype(np.float64)
        # An expert sees only some of a layer's tokens; the tensor with the most counts saw all.
        spans = weights if weights.sum() > spans.sum() else spans
        means = _Parts(points[-1][0], weights).mean, _Parts(points[-1][1], tokens).mean
        tensors[name] = _compare(
            _Counts(observation.code_dtype, then.sum(axis=0), now),
            scheme_of(calibration.manifest.recipe, observation),
            used.get(name),
            _distance(*means),
            level,
        )
    if not tensors:
        raise ConfigError("the live histograms hold no tensor that the calibration observed")
    if len(spans) < _FEWEST_SPANS:
        raise ConfigError(
            f"{calibration.path}: keeps the counts of {len(spans)} spans of samples, which do not"
            " show how samples vary: calibrate again, with at least 65 samples"
        )
    share = 1 / math.sqrt(len(points))
    live = _Parts(np.hstack([x for _, x in points]) * share, tokens)
    origin = _Parts(np.hstack([x for x, _ in points]) * share, spans)
    return Drift(
        windows=len(windows),
        tokens=int(tokens.sum()),
        began=min(window.began for window in windows),
        ended=max(window.ended for window in windows),
        false_alarms=false_alarms,
        distance=_distance(origin.mean, live.mean),
        noise=_noise(origin, live, false_alarms / 2),
        tolerance=_tolerance(calibration.manifest.recipe),
        tensors=tensors,
        uncounted=tuple(name for name in calibration.observations if name not in tensors),
    )


def _edges(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the first bins of cells with about equal shares of `counts`, and one cell beyond."""
    reached = np.cumsum(counts) / counts.sum()
    inner = np.searchsorted(reached, np.arange(1, _CELLS) / _CELLS) + 1
    edges = np.unique([0, *inner, np.flatnonzero(counts)[-1] + 1])
    return edges[edges < len(counts)]


def _embed(counts: NDArray[np.int64], edges: NDArray[np.int64]) -> Floats:
    """Returns the points [parts, cells] of `counts` [parts, 32768], whose distance is Hellinger's.

    A part without counts gets the point of all parts together, so that it adds no distance.
    """
    cells = np.add.reduceat(counts, edges, axis=1).astype(np.float64)
    cells = np.where(cells.any(axis=1, keepdims=True), cells, cells.sum(axis=0))
    return np.asarray(np.sqrt(cells / cells.sum(axis=1, keepdims=True) / 2))


def _distance(one: Floats, other: Floats) -> float:
    return float(np.linalg.norm(one - other))


def _noise(origin: _Parts, live: _Parts, chance: float) -> float:
    """Returns the distance that noise of both means exceeds with a probability of `chance`."""
    parts = [origin.noise, live.noise]
    # Scatter in r directions has r times the degrees of freedom. Spans are too few to estimate r.
    freedom = [live.rank * (len(x.tokens) - 1) for x in (origin, live)]
    expected = sum(parts)
    if expected == 0:
        return 0.0
    degrees = expected**2 / sum(x**2 / n for x, n in zip(parts, freedom, strict=True))  # Welch's
    return t_quantile(1 - chance / 2, max(1, int(degrees))) * math.sqrt(expected)


def _tolerance(recipe: Recipe) -> float:
    """Returns the distance that serving in the recipe's coarsest format causes."""
    schemes = [recipe.weights, recipe.activations, *(x.weights for x in recipe.overrides)]
    return max((_TOLERANCES[x.format] for x in schemes if x is not None), default=0.005)


@dataclass(frozen=True)
class _Counts:
    """Counts of a tensor: [32768] in the calibration, [windows, 32768] in live traffic."""

    code_dtype: CodeDtype
    then: NDArray[np.int64]
    now: NDArray[np.int64]

    def histograms(self) -> tuple[Histogram, Histogram]:
        live = self.now.sum(axis=0)
        return Histogram(self.then, self.code_dtype), Histogram(live, self.code_dtype)


def _compare(
    counts: _Counts,
    scheme: ObservedScheme,
    scale: float | None,
    distance: float,
    level: float,
) -> TensorDrift:
    """Compares a tensor, whose stored scale is `scale` if it has one."""
    then, now = counts.histograms()
    fmt = scheme.format
    if scale is None or fmt is None or not scheme.static:
        return TensorDrift(distance, then.absmax, now.absmax)
    new = scheme.scale(now)
    assert new is not None  # the scheme is static
    before, after, reachable = (
        effect(histogram, fmt, s) for histogram, s in ((then, scale), (now, scale), (now, new))
    )
    factor = 10 ** (GAIN_DB / 10)
    misfit = after.noise > factor * reachable.noise
    if misfit:  # on average; the interval over windows excludes that a few prompts are the cause
        windows = [Histogram(row, counts.code_dtype) for row in counts.now]
        excess = [effect(x, fmt, scale).noise - factor * effect(x, fmt, new).noise for x in windows]
        found = moments(np.array(excess), np.array([float(x.total) for x in windows]))
        misfit = bool(student_ends(found, level)[0] > 0)
    return TensorDrift(
        distance=distance,
        largest_then=then.absmax,
        largest_now=now.absmax,
        error_then=before.relative_error,
        error_now=after.relative_error,
        reachable=reachable.relative_error,
        saturated_then=before.saturated / max(1, before.elements),
        saturated_now=after.saturated / max(1, after.elements),
        underflow_then=before.underflow / max(1, before.elements),
        underflow_now=after.underflow / max(1, after.elements),
        misfit=misfit,
    )
