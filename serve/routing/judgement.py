"""The judgement of a pool: how far its answers are from those of a reference pool.

`serve/api/request/judge.py` copies requests, and adds what it measures. No text is kept.
"""

import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import numpy as np

from octet.confidence_sequence import ConfidenceSequence, Running
from serve.config import Judge

__all__ = ["Judgement", "Outcome", "Ruling"]

# exceeds: the whole interval is above the limit; within: the whole interval is below, and so is the
# plain mean, in which no answer is clipped; undecided: neither
Ruling: TypeAlias = Literal["undecided", "within", "exceeds"]
# Why a copy was not judged, if it was not:
#   unavailable, busy   one of the two pools has no free backend that may serve, or a queue
#   unproven            the reference has no backend that is proven
#   limit               tokens per minute, or copies in flight
#   too_long            prompt and answer fit into no context, or the prompt is over the limit
#   unsupported         a request with images, tools or others that are not plain text
#   tokenizer           the two pools tokenize differently
#   refused             one of them refuses the copy, or returns no log-probabilities of a prompt
#   failed, timeout     one of them failed, or took too long
Outcome: TypeAlias = (
    Literal["judged", "unavailable", "busy", "unproven", "limit", "too_long", "unsupported"]
    | Literal["tokenizer", "refused", "failed", "timeout", "cancelled"]
)
# Candidates of a divergence: 32 times below the limit to 32 times above, in eighths of an octave.
_MULTIPLES = 2.0 ** (np.arange(-40, 41) / 8)
_SHARES = np.linspace(0.0, 1.0, 201)
_LEAST = 100  # fewest answers of an interval; the next one sees changes as soon as it decides
_SIGMAS = 4  # standard deviations, at a divergence of the limit, beyond which an answer is clipped


class Judgement:
    def __init__(self, config: Judge, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.outcomes: Counter[Outcome] = Counter()
        self.in_flight = 0  # copies
        self.tokens = 0  # that copies took, of both pools
        self.problem = ""  # of the last copy, if no retry can help; one line
        self.problems = 0  # such copies in a row
        self._incarnations: dict[str, int] = {}  # of backends that were judged
        self._clock = clock
        self._allowance = float(config.tokens_per_minute)
        self._at = clock()
        self.restart()

    def restart(self) -> None:
        """Forgets every answer and the ruling: another checkpoint, or another step of a rollout."""
        self.ruling: Ruling = "undecided"
        self.low = 0.0  # nats; falls only when a later interval lies below it
        self.problem, self.problems = "", 0
        self._ended: tuple[Running, Running] | None = None  # the interval before, of both figures
        self._renew()

    def _renew(self) -> None:
        """Begins a new interval."""
        config, most = self.config, self.config.answer_tokens
        # The log-likelihood ratio of n tokens with a divergence of k has a variance of about 2kn.
        limit = config.max_kl * most
        self._kl = ConfidenceSequence(
            config.max_kl * _MULTIPLES, limit + _SIGMAS * math.sqrt(2 * limit)
        )
        self._agreement = ConfidenceSequence(_SHARES, most)

    @property
    def kl(self) -> Running:
        """Returns the divergence from the reference, in nats per token.

        It is that of the present interval, or of the one before until the present one decides.
        """
        return self._kl.now if self._ended is None else self._ended[0]

    @property
    def agreement(self) -> Running:
        """Returns the share of tokens at which both have the same likeliest token, of `kl`."""
        return self._agreement.now if self._ended is None else self._ended[1]

    def take(self, tokens: int) -> bool:
        """Decides whether a copy of about `tokens` tokens is within the limits; counts it if so."""
        now, rate = self._clock(), self.config.tokens_per_minute
        self._allowance = min(self._allowance + (now - self._at) * rate / 60, rate)
        self._at = now
        if self.in_flight >= self.config.max_in_flight or self._allowance < tokens:
            return False
        self._allowance -= tokens
        return True

    def saw(self, backend: str, incarnation: int) -> None:
        """Begins a new interval if `backend` restarted, perhaps with another checkpoint.

        A ruling "within" is withdrawn; "exceeds" stays until an interval lies below the limit.
        """
        before = self._incarnations.setdefault(backend, incarnation)
        if before != incarnation:
            self._incarnations[backend] = incarnation
            self._ended = None
            self._renew()
            if self.ruling == "within":
                self.ruling = "undecided"

    def add(self, total: float, tokens: int, agreed: int) -> bool:
        """Adds an answer; returns whether the ruling changed.

        `total` is the sum of log q - log p in nats over its `tokens` tokens, q being the pool's
        probabilities and p the reference's; inf if the pool returned NaN. `agreed` counts the
        tokens at which both have the same likeliest token.
        """
        self.problem, self.problems = "", 0
        self._kl.add(total, tokens)
        self._agreement.add(agreed, tokens)
        kl, before = self._kl.now, self.ruling
        if kl.low > self.low or kl.high <= self.low:
            self.low = kl.low
        exceeds = kl.low >= self.config.max_kl
        within = kl.high <= self.config.max_kl and kl.mean <= self.config.max_kl
        if decided := exceeds or within:
            self.ruling = "exceeds" if exceeds else "within"
        if kl.answers >= (min(_LEAST, self.config.window) if decided else self.config.window):
            self._ended = kl, self._agreement.now
            self._renew()
        elif decided:
            self._ended = None
        return self.ruling != before

    def failed(self, outcome: Outcome, problem: str) -> None:
        """Records a copy that could not be judged for a reason that no retry changes."""
        self.problem = f"{outcome}: {problem}"
        self.problems += 1

    def sentence(self) -> str:
        """Returns the figures, for people."""
        kl = self.kl
        mean = f" (plain mean {kl.mean:.4g})" if kl.tokens else ""
        return (
            f"{kl.answers} answers ({kl.tokens} tokens) diverge by {_bound(kl.low)} to"
            f" {_bound(kl.high)} nats per token from pool {self.config.reference}{mean};"
            f" the limit is {self.config.max_kl:g}"
        )

    def as_json(self) -> dict[str, Any]:
        """Returns the entry for /status."""
        kl, agreement = self.kl, self.agreement
        return {
            "reference": self.config.reference,
            "max_kl": self.config.max_kl,
            "ruling": self.ruling,
            "answers": kl.answers,
            "tokens": kl.tokens,
            "kl": _shown(kl.mean),
            "kl_interval": [_shown(kl.low), _shown(kl.high)],
            "agreement": _shown(agreement.mean),
            "agreement_interval": [_shown(agreement.low), _shown(min(agreement.high, 1.0))],
            "copies": dict(self.outcomes),
            "copied_tokens": self.tokens,
            "in_flight": self.in_flight,
            "problem": self.problem or None,
        }


def _bound(nats: float) -> str:
    return "any number of" if math.isinf(nats) else f"{nats:.4g}"


def _shown(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None
