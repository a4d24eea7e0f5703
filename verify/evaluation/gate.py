"""Decides whether an artifact is no worse than the reference, by more than a margin.

A non-inferiority test: not the estimate has to be within the margin, but the upper end of its 95 %
interval, so too little text fails too. Without a reference the first artifact takes its place, and
is not judged.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octet.errors import ConfigError, GateError
from octet.limit import Limit
from octet.statistics import Interval
from verify.evaluation.comparison import Comparison, Row

__all__ = ["Judged", "check_gate", "judge", "require_met"]


@dataclass(frozen=True)
class Judged:
    """One artifact and one limit; `upper` is the end of the interval that is compared with it."""

    name: str
    limit: Limit
    estimate: float
    upper: float

    @property
    def met(self) -> bool:
        return self.upper <= self.limit.value

    def __str__(self) -> str:
        unit, factor = ("nats", 1.0) if self.limit.metric == "kl" else ("%", 100.0)
        metric = "KL" if self.limit.metric == "kl" else "perplexity"
        found = f"{factor * self.estimate:+.2g} {unit}, 95 % interval up to"
        upper = f"{factor * self.upper:+.2g} {unit}"
        verdict = "within" if self.met else "not within"
        return f"{self.name}: {metric} {found} {upper}: {verdict} --gate {self.limit}"

    def as_json(self) -> dict[str, Any]:
        """Returns plain data; an unknown bound is null."""
        upper = self.upper if math.isfinite(self.upper) else None
        named = {"name": self.name, "metric": self.limit.metric, "limit": self.limit.value}
        return named | {"estimate": self.estimate, "upper": upper, "met": self.met}


def check_gate(limits: Sequence[Limit], *, reference: bool, targets: int) -> None:
    """Raises ConfigError for a gate with nothing to compare with; called before hours of work."""
    for limit in limits:
        if limit.metric == "kl" and not reference:
            raise ConfigError(f"--gate {limit}: divergence is measured from --reference: give it")
        if not reference and targets < 2:
            raise ConfigError(
                f"--gate {limit}: nothing to compare with: give --reference, or another artifact"
                " first"
            )


def judge(comparison: Comparison, limits: Sequence[Limit]) -> list[Judged]:
    """Judges every artifact by every limit."""
    found = []
    for row in comparison.rows[comparison.reference is None :]:
        for limit in limits:
            if (interval := _limited(row, limit)) is not None:
                upper = math.inf if math.isnan(interval.high) else interval.high
                found.append(Judged(row.name, limit, interval.mean, upper))
    return found


def require_met(judged: Sequence[Judged]) -> None:
    """Raises GateError, which names all limits that are not met."""
    if failed := [str(one) for one in judged if not one.met]:
        raise GateError(f"{'; '.join(failed)}; more samples narrow the interval")


def _limited(row: Row, limit: Limit) -> Interval | None:
    return row.kl if limit.metric == "kl" else row.change
