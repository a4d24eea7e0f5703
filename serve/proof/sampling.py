"""Decides from sampled tokens whether a server samples as a generation_config.json says.

Each sampled token comes with the log-probabilities of the likeliest tokens before sampling, so its
probability under any temperature, top-k, top-p and min-p is known. The evidence against the
declared settings is an e-value: the mean, over other settings, of the likelihood ratio of all
tokens. Its expectation under the declared settings is at most 1, so it reaches `1 / LEVEL` with a
probability of at most `LEVEL` (Markov's inequality; Vovk and Wang, "E-values", 2021).

Only the top tokens are known. Probabilities under the declared settings are therefore rounded up,
and the tokens outside the top count as one.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

__all__ = ["LEVEL", "Sampled", "Sampling", "divergence", "other_sampling"]

LEVEL = 1e-5
_FLOOR = 1e-6  # least probability of a token: one at a limit, by rounding, decides nothing alone
_EDGE = 0.02  # by which a token may miss top-p or min-p for rounding
_GREEDY = 0.01  # a lower temperature is greedy, as in vLLM


@dataclass(frozen=True, slots=True)
class Sampled:
    """One sampled token: its rank (None: outside the top) and the top log-probabilities, sorted."""

    rank: int | None
    top: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings; the values of vLLM where a generation_config.json has none."""

    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0

    @classmethod
    def of(cls, config: dict[str, Any]) -> Self:
        """Reads a generation_config.json; ignores values that are no numbers."""
        given = {
            name: config[name]
            for name in ("temperature", "top_k", "top_p", "min_p")
            if isinstance(config.get(name), int | float)
        }
        given["top_k"] = max(int(given.get("top_k", 0)), 0)
        return cls(**given)

    def __str__(self) -> str:
        return (
            f"temperature {self.temperature:g}, top_k {self.top_k}, top_p {self.top_p:g}, min_p"
            f" {self.min_p:g}"
        )

    def probability(self, token: Sampled, *, edge: float = 0.0) -> float:
        """Returns the token's probability; with `edge`, at least that."""
        top = token.top
        if self.temperature < _GREEDY:
            ties = sum(value == top[0] for value in top)
            return 1 / ties if token.rank is not None and token.rank < ties else 0.0
        weights = [math.exp((value - top[0]) / self.temperature) for value in top]
        rest = self._rest(top)
        if self.top_k and self.top_k <= len(top):
            weights, rest = weights[: self.top_k], 0.0
        # The others' weight is known at temperature 1 alone; other bounds leave it out.
        known = not edge or (self.temperature == 1 and not self.top_k and not self.min_p)
        most = self._kept(weights, rest, edge)
        least = self._kept(weights, rest if known else 0.0, -edge)
        whole = sum(weights[:least])
        if not edge:
            whole += rest if least == len(weights) else 0.0
        elif known:  # what top-p keeps is at least that share
            whole = max(whole, self.top_p * (sum(weights) + rest))
        if token.rank is not None:
            return min(weights[token.rank] / whole, 1.0) if token.rank < most else 0.0
        if most < len(weights):
            return 0.0
        return 1.0 if edge and self.temperature > 1 else min(rest / whole, 1.0)

    def _rest(self, top: Sequence[float]) -> float:
        """Returns the weight of all other tokens, as multiples of the likeliest one's.

        An upper bound for temperatures below 1, and exact at 1.
        """
        mass = max(1 - sum(map(math.exp, top)), 0.0)
        power = max(1 / self.temperature - 1, 0.0)
        return mass * math.exp(power * top[-1] - top[0] / self.temperature)

    def _kept(self, weights: Sequence[float], rest: float, edge: float) -> int:
        """Counts the tokens that top-p and min-p keep, with limits moved by `edge` to keep more."""
        enough = self.top_p + edge if self.top_p < 1 else math.inf
        low = self.min_p - edge if self.min_p > 0 else 0.0
        kept, reached, whole = 0, 0.0, sum(weights) + rest
        for weight in weights:
            if kept and (reached >= enough * whole or weight < low):
                break
            reached += weight
            kept += 1
        return kept


_OTHERS = tuple(
    Sampling(temperature, *limits)
    for temperature in (0.0, 0.3, 0.6, 0.8, 1.0, 1.4)
    for limits in ((0, 1.0), (20, 0.95), (0, 0.9), (5, 1.0))
    if temperature or limits == (0, 1.0)
)


def other_sampling(declared: Sampling, tokens: Sequence[Sampled]) -> Sampling | None:
    """Returns the settings that explain the tokens best if they refute `declared`, else None."""
    known = [token for token in tokens if token.top]
    others = [other for other in (*_OTHERS, Sampling()) if other != declared]
    null = sum(math.log(max(declared.probability(x, edge=_EDGE), _FLOOR)) for x in known)
    ratios = [_log_likelihood(other, known) - null for other in others]
    best = max(ratios)
    if best == -math.inf:
        return None
    evidence = best + math.log(sum(math.exp(r - best) for r in ratios) / len(ratios))
    return others[ratios.index(best)] if evidence >= -math.log(LEVEL) else None


def divergence(other: Sampling, declared: Sampling, top: Iterable[float]) -> float:
    """Returns KL(other || declared) in nats of a token drawn where `top` are the likeliest."""
    best = tuple(sorted(top, reverse=True))
    tokens = [Sampled(rank, best) for rank in (*range(len(best)), None)]
    pairs = [(other.probability(token), declared.probability(token)) for token in tokens]
    return sum(p * math.log(p / max(q, _FLOOR)) for p, q in pairs if p)


def _log_likelihood(sampling: Sampling, tokens: Sequence[Sampled]) -> float:
    """A token that the settings exclude makes them impossible."""
    found = [sampling.probability(token) for token in tokens]
    return sum(map(math.log, found)) if all(found) else -math.inf
