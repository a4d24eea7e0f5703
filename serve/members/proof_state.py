"""What is known of one backend's numbers: whether they were proven, by what, and at what cost."""

import math
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Literal, TypeAlias

from octet.proof.causes import Cause
from octet.proof.verdict import Verdict

__all__ = ["MemberProof", "ProofState", "measured"]

# unproven: not asked yet, or since it came back; or no verdict was possible so far
# proven:   its numbers are those of what it is said to serve
# admitted: it returns no log-probabilities, and the configuration lets it serve all the same
# refused:  its numbers, or what its engine says of itself, are of something else
ProofState: TypeAlias = Literal["unproven", "proven", "admitted", "refused"]


class MemberProof:
    """Of one backend, as long as it is in its pool. Times are of `clock`."""

    def __init__(self, label: str, identity: str, clock: Callable[[], float]) -> None:
        """`label` is what it is proven with, for people; `identity` that of the artifact."""
        self.label = label
        self.identity = identity
        self._clock = clock
        self.state: ProofState = "unproven"
        self.verdict: Verdict | None = None  # of this life of the backend
        self.cause: Cause | None = None  # of a refusal without a verdict
        self.reason = "it has not been asked yet"  # one line, for people
        self.notes: tuple[str, ...] = ()
        self.asking = False  # a probe is under way
        self.outcomes: Counter[str] = Counter()  # of probes
        self.prompts = 0  # that were answered
        self.tokens = 0  # that probes took, of prompts and answers
        self.last_time: datetime | None = None  # when the last probe ended
        self.seconds = 0.0  # that it took of the backend's time
        self.next_at = -math.inf  # when the next one is due, if it can be asked

    @property
    def admits(self) -> bool:
        """Whether the backend may serve."""
        return self.state in ("proven", "admitted")

    @property
    def measured_kl(self) -> float | None:
        """Nats from the reference at most, with 95 % confidence; None: not known."""
        if self.state != "proven" or self.verdict is None:
            return None
        nats = self.verdict.measure.kl_high
        return nats if math.isfinite(nats) else None

    def share(self, served_tokens: int) -> float:
        """Of all tokens that it has computed for this gateway, the part that probes took."""
        return self.tokens / max(self.tokens + served_tokens, 1)

    def forget(self, reason: str) -> None:
        """What is known is of a life that is over; the costs stay."""
        self.state, self.verdict, self.cause, self.notes = "unproven", None, None, ()
        self.reason = reason
        self.next_at = -math.inf

    def carry(self, before: "MemberProof") -> None:
        """Takes over what the proof before this one has cost."""
        self.tokens += before.tokens
        self.prompts += before.prompts
        self.outcomes += before.outcomes

    def probed(self, outcome: str) -> None:
        """A probe has ended."""
        self.outcomes[outcome] += 1
        self.last_time = datetime.now(UTC)

    def as_json(self, served_tokens: int) -> dict[str, Any]:
        """For /status. What it is proven with, and what it measures: nothing of where it is."""
        due_in_s = max(self.next_at - self._clock(), 0.0)
        at = None if self.last_time is None else self.last_time.isoformat(timespec="seconds")
        return {
            "state": self.state,
            "with": self.label,
            "artifact": self.identity,
            "reason": self.reason,
            **measured(self.verdict, self.cause),
            "notes": list(self.notes),
            "prompts": self.prompts,
            "tokens": self.tokens,
            "share": round(self.share(served_tokens), 6),
            "probes": dict(self.outcomes),
            "last_at": at,
            "last_took_s": round(self.seconds, 3),
            "next_in_s": round(due_in_s, 1),
        }


def measured(verdict: Verdict | None, cause: Cause | None = None) -> dict[str, Any]:
    """The figures of a verdict, in nats, and what they are held to be; None where there are none.

    `cause` is one that is known otherwise.
    """
    if verdict is None:
        names = ("outcome", "kl", "kl_interval", "expected_kl", "path")
        said = {"cause": cause and cause.sentence, "remedy": cause and cause.remedy}
        return dict.fromkeys(names) | said
    measure, expected, cause = verdict.measure, verdict.expected, cause or verdict.cause
    return {
        "outcome": verdict.outcome,
        "kl": _shown(measure.kl_mean),
        "kl_interval": [_shown(measure.kl_low), _shown(measure.kl_high)],
        "expected_kl": expected and [_shown(expected.low), _shown(expected.high)],
        "path": verdict.path and verdict.path.label,
        "cause": cause and cause.sentence,
        "remedy": cause and cause.remedy,
    }


def _shown(nats: float) -> float | None:
    """To four digits; None where nothing could be compared: JSON has no NaN."""
    return float(f"{nats:.4g}") if math.isfinite(nats) else None
