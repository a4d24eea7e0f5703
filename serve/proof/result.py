"""The result of a probe: the backend's answers, and why others are missing."""

from dataclasses import dataclass, field
from typing import Literal, Self

from octet.errors import OctetError
from octet.proof.responses import Response

__all__ = ["ALTERNATIVES", "Failure", "FailureKind", "Probed", "Unprovable"]

ALTERNATIVES = 20  # log-probabilities requested per position: as many as the reference has

# Why a record has no answer:
#   busy       no answer in time, or the server accepts no more now: worth a retry
#   gone       it cannot be reached, or its connection ended
#   failed     it reported a failure, or its answer cannot be parsed
#   context    the prompt is longer than the context it was started with
#   tokenizer  it tokenizes the prompt differently, or answers with tokens that are none of ours
#   refused    it refuses the request; the failure's text is its own
FailureKind = Literal["busy", "gone", "failed", "context", "tokenizer", "refused"]


class Unprovable(OctetError):
    """Raised for a backend that golden records can never judge, however often it is probed."""

    def __init__(self, message: str, kind: FailureKind) -> None:
        super().__init__(message)
        self.kind = kind

    @classmethod
    def in_context(cls, backend: str, tokens: int | None) -> Self:
        """Makes the error for a context of `tokens` tokens, into which no prompt fits."""
        line = f"was started for a context of {tokens} tokens, shorter than every golden prompt"
        return cls(f"{backend}: {line}", "context")


@dataclass(frozen=True, slots=True)
class Failure:
    """A record without an answer; `text` is one line."""

    record: int
    kind: FailureKind
    text: str


@dataclass
class Probed:
    """Result of a probe. Each record is in `responses` or in `failures`."""

    responses: list[Response] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    tokens: int = 0  # prompts and answers, as the backend counted; prompts alone for failures
    seconds: float = 0.0
    alternatives: int = 0  # log-probabilities per position; 0: it returns none
    salted: bool = False  # whether its prefix cache was bypassed

    @property
    def state(self) -> Literal["answered", "busy", "gone", "failed"]:
        """State of the backend: `answered` if there is anything to judge; `busy`: retry later."""
        kinds = {failure.kind for failure in self.failures}
        if self.responses or not kinds:
            return "answered"
        return "busy" if "busy" in kinds else "gone" if "gone" in kinds else "failed"

    @property
    def notes(self) -> list[str]:
        """Remarks that must accompany a verdict, one line each."""
        found = []
        if self.responses and not self.alternatives:
            found.append("it returns no log-probabilities: nothing could be compared")
        elif self.responses and self.alternatives < ALTERNATIVES:
            found.append(
                f"it returns {self.alternatives} log-probabilities of a token, not {ALTERNATIVES}:"
                " what it says of less likely ones is not known"
            )
        asked = len(self.responses) + len(self.failures)
        for kind, said in _SAID.items():
            some = [failure for failure in self.failures if failure.kind == kind]
            if some:
                found.append(f"{len(some)} of {asked} golden prompts {said}: {some[0].text}")
        return found


_SAID: dict[FailureKind, str] = {
    "context": "are longer than its context and left out",
    "tokenizer": "became other tokens and are left out",
    "busy": "were not answered in time",
    "gone": "were lost",
    "failed": "failed",
    "refused": "were refused",
}
