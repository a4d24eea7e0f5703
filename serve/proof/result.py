"""What came of asking a backend golden prompts: its answers, and why others are missing."""

from dataclasses import dataclass, field
from typing import Literal, Self

from octet.errors import OctetError
from octet.proof.responses import Response

__all__ = ["ALTERNATIVES", "Failure", "FailureKind", "Probed", "Unprovable"]

ALTERNATIVES = 20  # log-probabilities of a position that are asked for: what the reference has

# Why a record has no answer:
#   busy       no answer in time, or the server takes no more now: worth asking again
#   gone       it cannot be reached, or its connection ended
#   failed     it said that it failed, or what it sent cannot be read
#   context    the prompt is longer than what it was started for
#   tokenizer  it reads the prompt as other tokens, or answers with tokens that are none of ours
#   refused    it refuses the request, in its own words
FailureKind = Literal["busy", "gone", "failed", "context", "tokenizer", "refused"]


class Unprovable(OctetError):
    """A backend that golden records cannot be held against, however often it is asked."""

    def __init__(self, message: str, kind: FailureKind) -> None:
        super().__init__(message)
        self.kind = kind

    @classmethod
    def in_context(cls, backend: str, tokens: int | None) -> Self:
        """No prompt fits into its context of so many tokens."""
        line = f"was started for a context of {tokens} tokens, shorter than every golden prompt"
        return cls(f"{backend}: {line}", "context")


@dataclass(frozen=True, slots=True)
class Failure:
    """A record that was not answered; `text` is one line."""

    record: int
    kind: FailureKind
    text: str


@dataclass
class Probed:
    """What came of asking. Records are in `responses` or in `failures`."""

    responses: list[Response] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    tokens: int = 0  # prompts' and answers', as the backend counted; of failures, the prompts'
    seconds: float = 0.0
    alternatives: int = 0  # log-probabilities of a position; 0: it returns none
    salted: bool = False  # whether its prefix cache was kept out

    @property
    def state(self) -> Literal["answered", "busy", "gone", "failed"]:
        """Of the backend: `answered` if there is anything to judge; `busy`: ask again later."""
        kinds = {failure.kind for failure in self.failures}
        if self.responses or not kinds:
            return "answered"
        return "busy" if "busy" in kinds else "gone" if "gone" in kinds else "failed"

    @property
    def notes(self) -> list[str]:
        """What must be said beside a verdict, each one line."""
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
