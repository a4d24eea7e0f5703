"""Scales an activation tensor over a stream of steps by three rules, from exact histograms.

| rule    | the scale of a step                                                              |
|---------|----------------------------------------------------------------------------------|
| current | from the step's own largest magnitude, which costs a pass over the tensor        |
| delayed | from the largest magnitudes of earlier steps: Transformer Engine's DelayedScaling |
| frozen  | the calibration's, the same in every step                                        |

Delayed scaling is as published: github.com/NVIDIA/TransformerEngine, DelayedScaling in
transformer_engine/common/recipe/__init__.py, and the kernel in recipe/delayed_scaling.cu beside it.
A step is quantized with 2^margin · amax / fmt.max, where amax is the largest (`max`) or the last
(`most_recent`) of the `history` steps before it. The first step has scale 1, and an amax of 0
keeps the scale. (Transformer Engine's factor divides: it is the inverse of this scale.)
"""

from collections import deque
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from calibrate.journal.compact_counts import CompactCounts
from calibrate.observe.histogram import CodeDtype, Histogram
from calibrate.scales.activations import Effect, effect, scale_of
from octet.errors import ConfigError
from octet.numerics.formats import Format
from octet.recipe import MOST_MARGIN

__all__ = [
    "RULES",
    "Algorithm",
    "Course",
    "Delayed",
    "DelayedScale",
    "Point",
    "Rule",
    "TensorOverTime",
]

Algorithm = Literal["max", "most_recent"]
Rule: TypeAlias = Literal["frozen", "delayed", "current"]
RULES: tuple[Rule, ...] = ("frozen", "delayed", "current")

_POINTS = 256  # of a course, at most


@dataclass(frozen=True)
class Delayed:
    """The options of delayed scaling, with Transformer Engine's defaults.

    Raises ConfigError for options that it does not have.
    """

    history: int = 1024  # steps that are remembered
    algorithm: Algorithm = "max"
    margin: int = 0  # powers of two of head-room

    def __post_init__(self) -> None:
        if self.history < 1:
            raise ConfigError(
                f"a history of {self.history} steps: delayed scaling needs at least the last step,"
                " so give 1 or more"
            )
        if self.algorithm not in ("max", "most_recent"):
            raise ConfigError(
                f"no algorithm '{self.algorithm}': delayed scaling has max and most_recent"
            )
        if not 0 <= self.margin <= MOST_MARGIN:
            raise ConfigError(
                f"a margin of {self.margin}: give 0 to {MOST_MARGIN} powers of two of head-room"
            )


class DelayedScale:
    """The scale of one tensor by delayed scaling; `scale` is that of the next step."""

    def __init__(self, fmt: Format, options: Delayed) -> None:
        self.scale = 1.0
        self._format, self._options = fmt, options
        self._amaxes: deque[float] = deque(maxlen=options.history)

    def step(self, amax: float) -> None:
        """Records the largest magnitude of a step, and updates `scale`."""
        self._amaxes.append(amax)
        chosen = amax if self._options.algorithm == "most_recent" else max(self._amaxes)
        if chosen > 0:
            self.scale = scale_of(chosen, self._format, self._options.margin)


@dataclass(frozen=True)
class Point:
    """The largest current and delayed scale of some steps in succession, and the first's domain."""

    domain: str
    current: float
    delayed: float

    def joined(self, other: "Point") -> "Point":
        return Point(
            self.domain, max(self.current, other.current), max(self.delayed, other.delayed)
        )


class Course:
    """The scales of a tensor over time, as points of `width` steps each, 256 at most.

    In a longer stream, pairs of neighbouring points are joined. The last point may be of fewer
    steps.
    """

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.width = 1
        self._steps = 0

    def add(self, step: Point) -> None:
        if self._steps % self.width:
            self.points[-1] = self.points[-1].joined(step)
        elif len(self.points) == _POINTS:
            pairs = zip(self.points[::2], self.points[1::2], strict=True)
            self.points = [one.joined(other) for one, other in pairs]
            self.points.append(step)
            self.width *= 2
        else:
            self.points.append(step)
        self._steps += 1


class TensorOverTime:
    """One tensor over the steps of a stream, in memory that does not depend on their number.

    `effects` are those of each rule on each domain. `counts`, int64 [32768] by domain, are of all
    its steps together.
    """

    def __init__(self, fmt: Format, code_dtype: CodeDtype, frozen: float, delayed: Delayed) -> None:
        self.format, self.code_dtype, self.frozen = fmt, code_dtype, frozen
        self.effects: dict[tuple[str, Rule], Effect] = {}
        self.counts = CompactCounts()
        self.course = Course()
        self._delayed = DelayedScale(fmt, delayed)

    def step(self, domain: str, counts: NDArray[np.int64]) -> dict[Rule, float]:
        """Adds the counts of one step, int64 [32768], and returns its scale by each rule.

        The counts hold no NaN or Inf.
        """
        histogram = Histogram(counts, self.code_dtype)
        scales: dict[Rule, float] = {
            "frozen": self.frozen,
            "delayed": self._delayed.scale,
            "current": scale_of(histogram.absmax, self.format),
        }
        for rule, scale in scales.items():
            before = self.effects.get((domain, rule), Effect())
            self.effects[domain, rule] = before + effect(histogram, self.format, scale)
        if domain in self.counts:
            counts = counts + self.counts[domain]
        self.counts[domain] = counts
        self.course.add(Point(domain, scales["current"], scales["delayed"]))
        self._delayed.step(histogram.absmax)
        return scales

    def histogram(self, domain: str) -> Histogram:
        """Returns the histogram of all steps of a domain."""
        return Histogram(self.counts[domain], self.code_dtype)
