"""The proof of one backend: its state, what it was proven against, and what it cost."""

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Literal, TypeAlias

from octet.proof.causes import Cause
from octet.proof.verdict import Verdict

__all__ = ["PROVEN", "MemberProof", "ProofState", "measured", "proven_by"]

# unproven: not probed yet, or not since it came back; or no verdict was possible so far
# proven:   its log-probabilities match its declared configuration
# weakly_proven: they are within a bound, which is all that they can be compared with
# admitted: it returns no log-probabilities, and the configuration lets it serve all the same
# refused:  its log-probabilities, or its engine's report, contradict its declared configuration
ProofState: TypeAlias = Literal["unproven", "proven", "weakly_proven", "admitted", "refused"]
PROVEN: tuple[ProofState, ...] = ("proven", "weakly_proven")
HISTORY = 20  # probes that are remembered


class MemberProof:
    """State and cost of one backend's proof, as long as it is in its pool. Times are of `clock`."""

    def __init__(self, label: str, identity: str, clock: Callable[[], float]) -> None:
        """`label` names what it is proven against, for people; `identity` is the artifact's."""
        self.label = label
        self.identity = identity
        self._clock = clock
        self.state: ProofState = "unproven"
        self.verdict: Verdict | None = None  # of this incarnation
        self.cause: Cause | None = None  # of a refusal without a verdict
        self.reason = "it has not been probed yet"  # one line, for people
        self.notes: tuple[str, ...] = ()
        self.differences: tuple[str, ...] = ()  # defaults that differ from the artifact's
        self.settings: Mapping[str, str | int] = {}  # of the engine, as it was admitted
        self.probing = False  # a probe is under way
        self.outcomes: Counter[str] = Counter()  # of probes
        self.history: deque[dict[str, Any]] = deque(maxlen=HISTORY)  # probes, the newest last
        self.prompts = 0  # that were answered
        self.tokens = 0  # of probes, prompts and answers
        self.last_time: datetime | None = None  # when the last probe ended
        self.seconds = 0.0  # of the backend's time that the last probe took
        self.next_at = -math.inf  # when the next one is due, if the backend can be probed then

    @property
    def admits(self) -> bool:
        """Returns whether the backend may serve."""
        return self.state in (*PROVEN, "admitted")

    @property
    def measured_kl(self) -> float | None:
        """Returns the upper bound of the divergence, in nats (95 % confidence); None: unknown."""
        if self.state not in PROVEN or self.verdict is None:
            return None
        nats = self.verdict.measure.kl_high
        return nats if math.isfinite(nats) else None

    def share(self, served_tokens: int) -> float:
        """Returns the fraction of the tokens computed for this gateway that probes took."""
        return self.tokens / max(self.tokens + served_tokens, 1)

    def forget(self, reason: str) -> None:
        """Discards the result, which belongs to an ended incarnation; the costs stay."""
        self.state, self.verdict, self.cause, self.notes = "unproven", None, None, ()
        self.differences, self.settings = (), {}
        self.reason = reason
        self.next_at = -math.inf

    def carry(self, before: "MemberProof") -> None:
        """Adds the costs of the previous proof to this one's."""
        self.tokens += before.tokens
        self.prompts += before.prompts
        self.outcomes += before.outcomes
        self.history = deque((*before.history, *self.history), HISTORY)

    def probed(self, outcome: str, verdict: Verdict | None = None) -> None:
        """Records the end of a probe, and its verdict if there was one."""
        self.outcomes[outcome] += 1
        self.last_time = datetime.now(UTC)
        found = measured(verdict)
        self.history.append(
            {
                "at": self.last_time.isoformat(timespec="seconds"),
                "outcome": outcome,
                "kl": found["kl"],
                "kl_interval": found["kl_interval"],
            }
        )

    def as_json(self, served_tokens: int) -> dict[str, Any]:
        """Returns the entry for /status: the reference and the measurements, but no address."""
        due_in_s = max(self.next_at - self._clock(), 0.0)
        at = None if self.last_time is None else self.last_time.isoformat(timespec="seconds")
        return {
            "state": self.state,
            "with": self.label,
            "artifact": self.identity,
            "reason": self.reason,
            **measured(self.verdict, self.cause),
            "notes": list(self.notes),
            "differences": list(self.differences),
            "settings": dict(self.settings),
            "prompts": self.prompts,
            "tokens": self.tokens,
            "share": round(self.share(served_tokens), 6),
            "probing": self.probing,
            "probes": dict(self.outcomes),
            "history": list(self.history),
            "last_at": at,
            "last_took_s": round(self.seconds, 3),
            "next_in_s": round(due_in_s, 1),
        }


def proven_by(verdict: Verdict) -> ProofState:
    """Returns the state of a backend that passed with `verdict`."""
    return "weakly_proven" if verdict.weak else "proven"


def measured(verdict: Verdict | None, cause: Cause | None = None) -> dict[str, Any]:
    """Returns a verdict's figures, in nats, and the expected ones; None where there are none.

    `cause` takes precedence over the verdict's own.
    """
    if verdict is None:
        names = ("outcome", "kl", "kl_interval", "expected_kl", "path", "kv_cache", "left_out")
        known = {"cause": cause and cause.sentence, "remedy": cause and cause.remedy}
        return dict.fromkeys(names) | known
    measure, expected, cause = verdict.measure, verdict.expected, cause or verdict.cause
    return {
        "outcome": verdict.outcome,
        "kl": _shown(measure.kl_mean),
        "kl_interval": [_shown(measure.kl_low), _shown(measure.kl_high)],
        "expected_kl": expected and [_shown(expected.low), _shown(expected.high)],
        "path": verdict.path and verdict.path.label,
        "kv_cache": verdict.path and verdict.path.kv_cache,
        "left_out": verdict.left_out and asdict(verdict.left_out),
        "cause": cause and cause.sentence,
        "remedy": cause and cause.remedy,
    }


def _shown(nats: float) -> float | None:
    """Rounds to four digits; None where nothing could be compared: JSON has no NaN."""
    return float(f"{nats:.4g}") if math.isfinite(nats) else None
