"""From logits to tokens: greedy, temperature, top-k, top-p, and log-probabilities.

The order is vLLM's: logits / temperature, then top-k, then top-p over what top-k left, then one
draw by inverting the cumulative distribution. Each request has its own generator and takes one
number from it per token, so its draws do not depend on the rest of the batch. Logits are float32;
probabilities are computed and summed in float64. Log-probabilities are those of the raw logits,
before temperature and truncation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from serve.engine.request import GenerateRequest

__all__ = ["Sampling", "log_softmax", "sample", "top_logprobs"]

# Below this the division overflows float32 logits; the most likely token has all the mass anyway.
_GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of one request; `top_k` 0 keeps every token."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    generator: np.random.Generator = field(default_factory=np.random.default_rng)

    @classmethod
    def of(cls, request: GenerateRequest) -> "Sampling":
        """Reads them from a request; the operating system seeds a request without a seed."""
        generator = np.random.Generator(np.random.PCG64(request.seed))
        return cls(request.temperature, request.top_p, request.top_k, generator)

    @property
    def greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW or self.top_k == 1


def sample(logits: NDArray[np.float32], samplings: Sequence[Sampling]) -> NDArray[np.int64]:
    """Draws one token per row of `logits` [B, V]: int64 [B], -1 for a row with a NaN or +Inf.

    Ties between equal largest logits go to the lowest token id.
    """
    tokens: NDArray[np.int64] = logits.argmax(axis=-1)  # the first NaN of a row, if it has one
    broken = ~np.isfinite(logits[np.arange(len(tokens)), tokens])
    rows = [i for i, s in enumerate(samplings) if not s.greedy and not broken[i]]
    if rows:
        tokens[rows] = _draw(logits[rows], [samplings[i] for i in rows])
    tokens[broken] = -1
    return tokens


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Returns the natural logarithms of the softmax over the last axis, in float64."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def top_logprobs(logprobs: NDArray[np.float64], count: int) -> list[int]:
    """Returns the ids of the `count` largest of `logprobs` [V], in order; ties: lowest id first."""
    count = min(count, len(logprobs))
    if count == 0:
        return []
    threshold = np.partition(logprobs, -count)[-count]
    candidates = np.flatnonzero(logprobs >= threshold)
    order = np.argsort(-logprobs[candidates], kind="stable")[:count]
    return [int(token) for token in candidates[order]]


def _draw(logits: NDArray[np.float32], samplings: Sequence[Sampling]) -> NDArray[np.int64]:
    """Draws one token per row [B, V]; no row is greedy."""
    temperature = np.array([s.temperature for s in samplings])[:, None]
    scaled = logits.astype(np.float64) / temperature
    scaled -= scaled.max(axis=-1, keepdims=True)
    weights = np.exp(scaled)  # [B, V], the largest is 1
    for row, sampling in enumerate(samplings):
        if 0 < sampling.top_k < weights.shape[1] or sampling.top_p < 1:
            _truncate(weights[row], sampling)
    cumulative = np.cumsum(weights, axis=-1)
    numbers = np.array([s.generator.random() for s in samplings])
    # random() is below 1, but its product with the total may round up to it.
    totals = cumulative[:, -1]
    targets = np.minimum(numbers * totals, np.nextafter(totals, 0))[:, None]
    # The first index whose sum exceeds the target.
    drawn: NDArray[np.int64] = (cumulative <= targets).sum(axis=-1)
    return drawn


def _truncate(weights: NDArray[np.float64], sampling: Sampling) -> None:
    """Zeroes what top-k and then top-p exclude; tokens tied with the last one kept are kept."""
    if 0 < sampling.top_k < len(weights):
        threshold = np.partition(weights, -sampling.top_k)[-sampling.top_k]
        weights[weights < threshold] = 0
    if sampling.top_p < 1:
        kept = np.sort(weights[weights > 0])[::-1]
        cumulative = np.cumsum(kept)
        # The smallest set whose mass reaches top_p: all tokens before it is reached, and one more.
        last = int(np.searchsorted(cumulative, sampling.top_p * cumulative[-1]))
        weights[weights < kept[min(last, len(kept) - 1)]] = 0
