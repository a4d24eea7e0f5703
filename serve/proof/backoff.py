"""When a backend is asked again, and how much that may cost."""

import random

__all__ = ["REFUSED_S", "UNCLEAR_S", "Backoff", "allowance"]

# Before the first and before the later tries:
UNCLEAR_S = (1.0, 60.0)  # where it did not answer, being busy most likely
REFUSED_S = (10.0, 600.0)  # where its numbers are wrong, or do not tell: somebody may repair it
_SPREAD = 0.25  # up to so much more, or less: gateways that began together do not stay together


class Backoff:
    """Doubles from one try to the next."""

    def __init__(self, rng: random.Random) -> None:
        self._random = rng.uniform
        self._tries = 0

    def reset(self) -> None:
        self._tries = 0

    def next(self, limits: tuple[float, float]) -> float:
        """Seconds until the next try, between `limits` but for the spread."""
        first, most = limits
        wait_s = min(first * 2.0 ** min(self._tries, 30), most)
        self._tries += 1
        return wait_s * self._random(1 - _SPREAD, 1 + _SPREAD)


def allowance(share: float, served: int, spent: int) -> int:
    """Tokens that the next probe may take, so that all of them are at most `share` of all tokens.

    `served` are clients' tokens; `spent` are those of every probe so far, admissions included: one
    that cost much is made up for by later probes, which wait until enough has been served.
    """
    if share >= 1.0:
        return 2**31
    return int(share * served / (1.0 - share)) - spent
