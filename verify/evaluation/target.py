"""What a model says of one sample: how likely each token was, and what else it thought likely."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

__all__ = ["Answer", "AskedByUrl", "Target", "digest_of", "top_k"]


@dataclass(frozen=True)
class Answer:
    """Log-probabilities (natural, of the full softmax) at the P positions that precede a token.

    `logprobs` float32 [P] are of tokens 1 to P of the sample; `top_ids` int32 [P, k] and
    `top_logprobs` float32 [P, k] are the most likely ones there, most likely first.
    """

    logprobs: NDArray[np.float32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]

    @property
    def finite(self) -> bool:
        return bool(np.isfinite(self.logprobs).all() and np.isfinite(self.top_logprobs).all())


class Target(Protocol):
    """Something that answers: an export, a checkpoint, a server."""

    @property
    def name(self) -> str:
        """As the user called it."""

    @property
    def identity(self) -> Mapping[str, str]:
        """What its answers follow from: hashes of files, or what a server says of itself."""

    @property
    def longest(self) -> int | None:
        """Tokens of a sample that it can read; None if nothing limits them."""

    @property
    def vocabulary(self) -> int | None:
        """Token ids are below this; None if it does not say."""

    @property
    def lasting(self) -> bool:
        """Whether equal identities mean equal answers: not of a server, which may be restarted."""

    def encode(self, text: str) -> list[int] | None:
        """The tokens of `text` by its own tokenizer; None if it has none here."""

    def answers(self, samples: Sequence[Sequence[int]], k: int) -> Iterator[tuple[int, Answer]]:
        """(index, answer) of each of `samples`, token ids of two or more, in any order.

        Raises NumericsError for NaN or Inf, BackendError for a server that fails.
        """


def top_k(logprobs: NDArray[np.float64], k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Ids int32 and values float32 [P, k] of the k largest of `logprobs` [P, V], in order."""
    found = np.argpartition(logprobs, -k, axis=1)[:, -k:]
    values = np.take_along_axis(logprobs, found, axis=1)
    order = np.argsort(-values, axis=1, kind="stable")
    ids = np.take_along_axis(found, order, axis=1).astype(np.int32)
    return ids, np.take_along_axis(values, order, axis=1).astype(np.float32)


def digest_of(ids: Sequence[int]) -> str:
    """What an answer is kept under: a hash of the sample's token ids."""
    return hashlib.sha256(np.asarray(ids, "<i4").tobytes()).hexdigest()[:32]


@runtime_checkable
class AskedByUrl(Protocol):
    """A target that is a running server."""

    url: str  # without /v1
    model: str  # as it calls it
    longest: int | None  # tokens of a prompt, one less than of its context
