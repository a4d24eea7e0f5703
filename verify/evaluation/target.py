"""Defines what a model under evaluation returns: log-probabilities of a sample and of the top k."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from octet.proof.top_k import TopK

__all__ = ["Answer", "ServedTarget", "Target", "digest_of", "top_k"]


@dataclass(frozen=True)
class Answer:
    """Log-probabilities (natural, of the full softmax) at the P positions that precede a token.

    `logprobs` float32 [P] are of tokens 1 to P of the sample; `top_ids` int32 [P, k] and
    `top_logprobs` float32 [P, k] are the most likely tokens there, most likely first.
    """

    logprobs: NDArray[np.float32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]

    @property
    def top(self) -> TopK:
        return TopK(self.top_ids, self.top_logprobs)

    @property
    def finite(self) -> bool:
        return bool(np.isfinite(self.logprobs).all() and np.isfinite(self.top_logprobs).all())


class Target(Protocol):
    """A model under evaluation: an export, a checkpoint or a server."""

    @property
    def name(self) -> str:
        """Name that the user gave."""

    @property
    def identity(self) -> Mapping[str, str]:
        """Facts that determine its answers: hashes of files, or what a server reports of itself."""

    @property
    def longest(self) -> int | None:
        """Most tokens that a sample can have; None if there is no limit."""

    @property
    def vocabulary(self) -> int | None:
        """Exclusive upper bound of token ids; None if unknown."""

    @property
    def lasting(self) -> bool:
        """True if equal identities mean equal answers; False for a server, which may restart."""

    def encode(self, text: str) -> list[int] | None:
        """Returns the tokens of `text` by its own tokenizer; None if it has none here."""

    @property
    def decode(self) -> Callable[[Sequence[int]], str] | None:
        """Makes text of token ids, special tokens included; None if it has no tokenizer here."""

    def answers(self, samples: Sequence[Sequence[int]], k: int) -> Iterator[tuple[int, Answer]]:
        """Yields (index, answer) for each of `samples`, in any order; each has two or more ids.

        Raises NumericsError for NaN or Inf, BackendError for a server that fails.
        """


def top_k(logprobs: NDArray[np.float64], k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Returns ids int32 and values float32 [P, k] of the k largest of `logprobs` [P, V], sorted."""
    found = np.argpartition(logprobs, -k, axis=1)[:, -k:]
    values = np.take_along_axis(logprobs, found, axis=1)
    order = np.argsort(-values, axis=1, kind="stable")
    ids = np.take_along_axis(found, order, axis=1).astype(np.int32)
    return ids, np.take_along_axis(values, order, axis=1).astype(np.float32)


def digest_of(ids: Sequence[int]) -> str:
    """Returns the key that an answer is stored under: a hash of the sample's token ids."""
    return hashlib.sha256(np.asarray(ids, "<i4").tobytes()).hexdigest()[:32]


@runtime_checkable
class ServedTarget(Protocol):
    """A target that is a running server."""

    name: str  # that the user gave
    url: str  # without /v1
    model: str  # the server's name for it
    longest: int | None  # most tokens of a prompt, one less than its context
