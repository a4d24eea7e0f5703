"""The verdict on a server, for people and for machines."""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from octet.artifacts.serving_path import ServingPath
from octet.proof.causes import Cause
from octet.proof.divergence import Measure

__all__ = ["WEAK", "LeftOut", "Outcome", "Range", "Score", "Verdict", "range_text", "sentence"]

Outcome = Literal["as_expected", "better", "worse", "inconclusive"]
WEAK = "weakly proven: a fault that costs less than the bound would not show"


@dataclass(frozen=True)
class Range:
    """The expected `Measure.kl_mean` of a conforming server, in nats, and its 95 % interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Score:
    """The fit of one scenario to the answers.

    `log_likelihood` is the mean over prompts, per dimension of the noise, up to a constant. `z` is
    the standardized difference from the best conforming path (Vuong's statistic): below zero, the
    scenario explains the answers worse. `separation` is the z that a conforming server is expected
    to have against the scenario.
    """

    label: str
    log_likelihood: float
    z: float
    separation: float
    prompts: int


@dataclass(frozen=True)
class LeftOut:
    """Golden prompts that do not fit into a server's context, and that it was not sent."""

    prompts: int
    of: int  # golden prompts in all
    from_tokens: int  # length of the shortest of them

    @property
    def text(self) -> str:
        return (
            f"{self.prompts} of {self.of} golden prompts do not fit into its context:"
            f" nothing of {self.from_tokens} tokens or more was examined"
        )


@dataclass(frozen=True)
class Verdict:
    """The judgement on a server.

    `outcome` is `as_expected`, `better` (not quantized as declared), `worse` (corrupt) or
    `inconclusive`.
    """

    outcome: Outcome
    measure: Measure
    expected: Range | None  # `kl_mean` in simulations of `path`, on the same positions
    path: ServingPath | None  # the conforming path that explains the answers best
    cause: Cause | None  # if the answers are not as expected
    ranking: tuple[Score, ...]  # likeliest first
    hidden: tuple[str, ...]  # scenarios that this test cannot distinguish from a conforming server
    reason: str  # one line: measured and expected divergence, likely cause, remedy
    bound: float | None = None  # nats, if nothing else was there to judge by
    left_out: LeftOut | None = None

    @property
    def weak(self) -> bool:
        """Returns whether only a bound was checked, which smaller faults would pass."""
        return self.outcome == "as_expected" and self.bound is not None

    def leaving_out(self, left_out: LeftOut | None) -> "Verdict":
        """Returns the same verdict with what it does not cover."""
        if left_out is None:
            return self
        return replace(self, left_out=left_out, reason=f"{self.reason}; {left_out.text}")

    def as_json(self) -> dict[str, Any]:
        """Returns all fields, in JSON's types."""
        path = None if self.path is None else self.path.label
        data: dict[str, Any] = _finite({**asdict(self), "path": path, "weak": self.weak})
        return data


_OUTCOMES = {
    "as_expected": "as expected",
    "better": "better than expected",
    "worse": "worse than expected",
    "inconclusive": "inconclusive",
}


def sentence(
    outcome: Outcome,
    measured: Measure,
    against: str,
    cause: Cause | None,
    expected: Range | None = None,
) -> str:
    """Returns one line for people; `against` names the expected range, or the bound."""
    kl = range_text(Range(measured.kl_mean, measured.kl_low, measured.kl_high))
    word = _OUTCOMES[outcome]
    mean = measured.kl_mean
    if expected is not None and (
        (outcome == "worse" and mean <= expected.high)
        or (outcome == "better" and mean > expected.high)
    ):
        word = "other than expected"  # no farther from the reference, or not nearer to it
    text = f"{word}: {kl} nats over {measured.prompts} prompts {against}"
    if outcome == "as_expected" and measured.coverage is not None:
        text += f"; examined: {measured.coverage.text}"
    return (
        text if cause is None else f"{text}; its log-probabilities {cause.sentence}: {cause.remedy}"
    )


def range_text(found: Range) -> str:
    return f"{found.mean:.3g} ({found.low:.3g} to {found.high:.3g})"


def _finite(value: Any) -> Any:
    """Replaces each NaN and infinity, which JSON lacks, with None."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
