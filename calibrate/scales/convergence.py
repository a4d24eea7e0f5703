"""Checks that the samples sufficed, by deriving each tensor's scale from fewer samples too.

The scale derived from the first n samples is evaluated on all N: values that it saturates there, it
would saturate in service. n is the last count that leaves out at least a quarter of the set. The
change from n to N is the cost of not having seen the samples in between, and about as much may be
expected from the next N - n samples. (Samples unlike those of the set can cost more; the set cannot
show that.)

- Static scale: it moved if the scale from n samples has an SQNR, on all N, over 0.2 dB (5 % of the
  noise) below that of the scale from N. A scale may move by much more than its error: E4M3 has 19
  octaves, and the error on a relative grid hardly depends on where the grid starts.
- Two levels: the error depends on the groups, which a histogram does not hold. The global scale
  moved if it grew by over 1/6: values up to 7/6 of the largest still round to E2M1's 6, larger ones
  would have been clipped (their group's scale saturates at E4M3's 448).
- Scales computed at run time, and full precision: no scale is stored, so none can be outgrown. The
  largest magnitude and the 99.9 % quantile are reported, without warnings.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibrate.observe.histogram import Histogram
from calibrate.scales.activations import measure
from calibrate.scales.tensor_scheme import ObservedScheme, scheme_of
from octet.artifacts.calibration import Observation
from octet.recipe import Recipe

__all__ = ["TOLERANCE_DB", "TOLERANCE_SCALE", "Convergence", "Course", "convergence"]

TOLERANCE_DB = 0.2
TOLERANCE_SCALE = 1 / 6
_LEAST_STEP = 0.25  # share of the samples; fewer additional ones would show nothing
_NAMED = 3  # tensors named in a sentence


@dataclass(frozen=True)
class Course:
    """One tensor's scale and figures, as derived from each of several counts of samples.

    `sqnr_db` is that of each `scale` on all samples. `scale` is None if none is stored; `sqnr_db`
    is None also if a histogram cannot give it. `before` is the index of the count that the last
    one is compared with, None if there is none.
    """

    format: str | None
    method: str | None
    scale: tuple[float, ...] | None
    sqnr_db: tuple[float, ...] | None
    absmax: tuple[float, ...]
    p999: tuple[float, ...]
    before: int | None

    @property
    def lost_db(self) -> float | None:
        """SQNR that the scale from fewer samples loses on all; negative if it does better."""
        if self.sqnr_db is None or self.before is None:
            return None
        before, after = self.sqnr_db[self.before], self.sqnr_db[-1]
        return 0.0 if before == after else after - before  # both may be infinite

    @property
    def grown(self) -> float | None:
        """Relative change of the scale by the last samples."""
        if self.scale is None or self.before is None:
            return None
        return self.scale[-1] / self.scale[self.before] - 1

    @property
    def moved(self) -> bool:
        """True if the last samples changed the scale by more than the tolerance."""
        if self.lost_db is not None:
            return self.lost_db > TOLERANCE_DB
        return self.grown is not None and self.grown > TOLERANCE_SCALE


@dataclass(frozen=True)
class Convergence:
    """Courses of `tensors`, by observation, at each of `counts` samples (cumulative)."""

    counts: tuple[int, ...]
    tensors: Mapping[str, Course]
    weighs_inputs: bool = False  # whether scales of weights depend on the samples

    @property
    def before(self) -> int | None:
        """The index of the count that the last is compared with."""
        return _before(self.counts)

    @property
    def moved(self) -> tuple[str, ...]:
        """Names of the tensors that had not settled, the worst first."""
        return tuple(
            sorted(
                (name for name, course in self.tensors.items() if course.moved),
                key=lambda name: -_size(self.tensors[name]),
            )
        )

    @property
    def enough(self) -> bool | None:
        """True if no tensor moved; None if there is nothing to compare with."""
        return None if self.before is None else not self.moved

    @property
    def decides(self) -> bool:
        """True if the samples decide any scale that is stored, apart from those of weights."""
        return any(
            course.method != "range" or set(course.scale or ()) != {1.0}
            for course in self._stored.values()
        )

    @property
    def _stored(self) -> dict[str, Course]:
        return {n: course for n, course in self.tensors.items() if course.scale is not None}

    @property
    def verdict(self) -> str:
        """One or two sentences of text."""
        if not self.decides and self.weighs_inputs:
            return (
                "The scales of 4-bit weights are for the inputs of the samples, and inputs are"
                " scaled at run time. Whether the samples are enough for that is not measured."
            )
        if not self.decides:
            return (
                "No scale is taken from the samples: inputs are scaled at run time"
                + (", and the cache needs no scale" if self._stored else "")
                + ". Only the golden records and the expected divergence depend on them."
            )
        if self.before is None:
            return (
                f"Whether {self.counts[-1]} samples are enough is not known: there are too few to"
                " compare a part of them with all."
            )
        before, count = self.counts[self.before], self.counts[-1]
        stored = self._stored
        if self.moved:
            rest = len(self.moved) - _NAMED
            named = ", ".join(f"{n} ({_change(stored[n])})" for n in self.moved[:_NAMED])
            more = f" and {rest} more" if rest > 0 else ""
            return (
                f"{count} samples may not be enough: those after the first {before} still moved"
                f" {len(self.moved)} of {len(stored)} tensors: {named}{more}."
                f" Calibrate on {2 * count} or more."
            )
        return f"{count} samples were enough: {self._settled(before, stored)}"

    def _settled(self, before: int, stored: Mapping[str, Course]) -> str:
        moving = {n: c for n, c in stored.items() if c.method != "range"}
        costs = {n: c.lost_db for n, c in moving.items() if c.lost_db is not None}
        parts = []
        if costs:
            worst = max(costs, key=lambda name: costs[name])
            cost = "no expected error"
            if costs[worst] >= 0.005:
                cost = f"the expected error of a tensor by at most {costs[worst]:.2f} dB"
            parts.append(f"those after the first {before} changed {cost}")
        growth = {n: c.grown for n, c in stored.items() if c.grown is not None}
        name = max(growth, key=lambda name: abs(growth[name]))
        if growth[name]:
            parts.append(f"the scale that moved most, by {growth[name]:+.1%}, is {name}")
        else:
            parts.append("no scale moved")
        return "; ".join(parts) + "."

    def as_json(self) -> dict[str, Any]:
        """Returns plain data; an infinite SQNR becomes null."""
        return {
            "counts": list(self.counts),
            "before": self.before,
            "tolerance": {"sqnr_db": TOLERANCE_DB, "global_scale": TOLERANCE_SCALE},
            "tensors": {name: _course_json(course) for name, course in self.tensors.items()},
            "enough": self.enough,
            "verdict": self.verdict,
            "moved": list(self.moved),
        }


def convergence(
    chunks: Mapping[str, NDArray[np.int64]],
    observations: Mapping[str, Observation],
    recipe: Recipe,
    counts: Sequence[int],
) -> Convergence:
    """Computes the course of every observed tensor under `recipe`.

    `chunks` holds, by observation, the counts that each span of samples adds, int64
    [len(counts), 32768]. `counts` are the cumulative samples at the end of each span, ascending.
    """
    before = _before(counts)
    tensors = {
        name: _course(chunks[name], observation, scheme_of(recipe, observation), before)
        for name, observation in observations.items()
    }
    return Convergence(tuple(counts), tensors, recipe.weighs_inputs)


def _course(
    chunks: NDArray[np.int64],
    observation: Observation,
    treatment: ObservedScheme,
    before: int | None,
) -> Course:
    sums = [Histogram(counts, observation.code_dtype) for counts in np.cumsum(chunks, axis=0)]
    everything, fmt = sums[-1], treatment.format
    scales = [scale for part in sums if (scale := treatment.scale(part)) is not None]
    quality = None
    if fmt is not None and treatment.static:
        quality = tuple(measure(everything, fmt, scale).sqnr_db for scale in scales)
    return Course(
        format=None if fmt is None else fmt.name,
        method=treatment.method if scales else None,
        scale=tuple(scales) or None,
        sqnr_db=quality,
        absmax=tuple(part.absmax for part in sums),
        p999=tuple(part.quantile(0.999) for part in sums),
        before=before,
    )


def _course_json(course: Course) -> dict[str, Any]:
    sqnr_db = course.sqnr_db
    return {
        "format": course.format,
        "method": course.method,
        "scale": None if course.scale is None else list(course.scale),
        "sqnr_db": None
        if sqnr_db is None
        else [value if math.isfinite(value) else None for value in sqnr_db],
        "absmax": list(course.absmax),
        "p999": list(course.p999),
    }


def _before(counts: Sequence[int]) -> int | None:
    some = [i for i, count in enumerate(counts) if count <= (1 - _LEAST_STEP) * counts[-1]]
    return some[-1] if some else None


def _size(course: Course) -> float:
    """Returns how far a tensor moved, in multiples of its tolerance."""
    if course.lost_db is not None:
        return course.lost_db / TOLERANCE_DB
    return (course.grown or 0.0) / TOLERANCE_SCALE


def _change(course: Course) -> str:
    if course.lost_db is not None:
        return f"{course.lost_db:.1f} dB"
    return f"global scale {course.grown or 0.0:+.0%}"
