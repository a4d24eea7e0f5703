"""Delays between the probes of a backend, and the tokens that a probe may take."""

import random

__all__ = ["REFUSED_S", "UNCLEAR_S", "Backoff", "allowance"]

# Delay before the first try, and the longest before a later one:
UNCLEAR_S = (1.0, 60.0)  # if it did not answer, most likely because it is busy
REFUSED_S = (10.0, 600.0)  # if its answers are wrong or inconclusive: somebody may repair it
_SPREAD = 0.25  # jitter, as a fraction of the delay: gateways that start together drift apart


class Backoff:
    """A delay that doubles from one try to the next."""

    def __init__(self, rng: random.Random) -> None:
        self._random = rng.uniform
        self._tries = 0

    def reset(self) -> None:
        self._tries = 0

    def next(self, limits: tuple[float, float]) -> float:
        """Returns the seconds until the next try, within `limits` apart from the jitter."""
        first, most = limits
        wait_s = min(first * 2.0 ** min(self._tries, 30), most)
        self._tries += 1
        return wait_s * self._random(1 - _SPREAD, 1 + _SPREAD)


def allowance(share: float, served: int, spent: int) -> int:
    """Returns the tokens that the next probe may take: probes get at most `share` of all tokens.

    `served` counts clients' tokens; `spent` counts those of every probe so far, admissions
    included. After an expensive probe, later ones wait until enough has been served.
    """
    if share >= 1.0:
        return 2**31
    return int(share * served / (1.0 - share)) - spent
