"""Was the set enough? What each tensor's scale would have been after fewer samples.

The scale that the first n samples lead to is judged on all N: what it saturates there, it would
saturate in service. So the step from n to N, with n the last count that leaves out at least a
quarter of the set, says what the samples in between would have cost had they not been seen, and the
next as many may be expected to cost about as much. (Samples unlike those of the set can cost more;
nothing in the set can tell.)

- A static scale: it moved if the scale of the last n has an SQNR, on all N, that is over 0.2 dB
  (5 % of the noise) below that of N's. A scale may move by much more than its error: E4M3 has 19
  octaves, and a grid that is relative hardly cares where it starts.
- Two levels: the error depends on the groups, which a histogram does not have. The global scale
  moved if it grew by over 1/6: values up to 7/6 of the largest still round to E2M1's 6, larger ones
  would have been clipped (their group's scale saturates at E4M3's 448).
- Scales made at run time, and what stays in full precision: nothing is stored, so nothing can be
  outgrown. The largest magnitude and the 99.9 % quantile are reported, and never warned about.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibrate.observe.histogram import Histogram
from calibrate.scales.activations import measure
from calibrate.scales.tensor_scheme import Treatment, treatment_of
from octet.artifacts.calibration import Observation
from octet.recipe import Recipe

__all__ = ["TOLERANCE_DB", "TOLERANCE_SCALE", "Convergence", "Course", "convergence"]

TOLERANCE_DB = 0.2
TOLERANCE_SCALE = 1 / 6
_LEAST_STEP = 0.25  # of the set: two samples more or less say nothing
_NAMED = 3  # tensors named in a sentence


@dataclass(frozen=True)
class Course:
    """One tensor at each count of samples; `sqnr_db` is that of `scale` on all samples.

    `scale` is None where none is stored, `sqnr_db` also where a histogram cannot give it. `before`
    is the index of the count that the last is compared with, None if there is no such.
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
        """What the last samples would have cost, unseen; negative if the smaller set did better."""
        if self.sqnr_db is None or self.before is None:
            return None
        before, after = self.sqnr_db[self.before], self.sqnr_db[-1]
        return 0.0 if before == after else after - before  # equal: perhaps both infinite

    @property
    def grown(self) -> float | None:
        """By how much of itself the last samples changed the scale."""
        if self.scale is None or self.before is None:
            return None
        return self.scale[-1] / self.scale[self.before] - 1

    @property
    def moved(self) -> bool:
        if self.lost_db is not None:
            return self.lost_db > TOLERANCE_DB
        return self.grown is not None and self.grown > TOLERANCE_SCALE


@dataclass(frozen=True)
class Convergence:
    """`tensors` by observation, at each of `counts` samples (cumulative)."""

    counts: tuple[int, ...]
    tensors: Mapping[str, Course]

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
        """None: there is nothing to compare with."""
        return None if self.before is None else not self.moved

    @property
    def verdict(self) -> str:
        """One or two sentences for people."""
        if self.before is None:
            return (
                f"Whether {self.counts[-1]} samples are enough is not known: there are too few to"
                " compare a part of them with all."
            )
        before, count = self.counts[self.before], self.counts[-1]
        stored = {n: c for n, c in self.tensors.items() if c.scale is not None}
        if all(c.method == "range" and set(c.scale or ()) == {1.0} for c in stored.values()):
            return (
                f"{count} samples are enough: with this recipe inputs are scaled at run time"
                + (" and the cache needs no scale" if stored else "")
                + ", so more of them would change nothing that is served."
            )
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
        """Plain data; an infinite SQNR is null."""
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
    """`chunks` by observation, int64[len(counts), 32768]: what each span of samples adds.

    `counts` are the samples at the end of each span, ascending.
    """
    before = _before(counts)
    tensors = {
        name: _course(chunks[name], observation, treatment_of(recipe, observation), before)
        for name, observation in observations.items()
    }
    return Convergence(tuple(counts), tensors)


def _course(
    chunks: NDArray[np.int64],
    observation: Observation,
    treatment: Treatment,
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
    """How far beyond its tolerance a tensor moved."""
    if course.lost_db is not None:
        return course.lost_db / TOLERANCE_DB
    return (course.grown or 0.0) / TOLERANCE_SCALE


def _change(course: Course) -> str:
    if course.lost_db is not None:
        return f"{course.lost_db:.1f} dB"
    return f"global scale {course.grown or 0.0:+.0%}"
