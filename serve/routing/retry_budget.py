"""Limits the retries of a pool: Envoy's retry budget, and AWS's full jitter.

Retries of a struggling pool add to the load that made it struggle. So at any time only a fraction
of the active requests may be retries, or a small fixed number if there are few requests.
"""

import random
from collections.abc import Callable

from serve.config import Retries

__all__ = ["RetryBudget"]

_BACKOFF_S, _MAX_BACKOFF_S = 0.025, 0.25  # limit before the second retry, and before any


class RetryBudget:
    """Counts the retries under way in one pool."""

    def __init__(
        self,
        config: Retries,
        active: Callable[[], int],
        *,
        rng: random.Random | None = None,
    ) -> None:
        """`active` returns the pool's number of requests, retries included."""
        self.config = config
        self._active = active
        self._rng = rng or random.Random()
        self.retrying = 0  # requests

    def take(self) -> bool:
        """Returns whether one more retry may begin; it counts until `give_back`."""
        allowed = max(self.config.min_concurrent, self.config.budget * self._active())
        if self.retrying + 1 > allowed:
            return False
        self.retrying += 1
        return True

    def give_back(self) -> None:
        """Ends the count of one retry, whatever its outcome."""
        assert self.retrying > 0
        self.retrying -= 1

    def backoff_s(self, retry: int) -> float:
        """Returns the seconds to wait before the `retry`-th retry of a request, counted from 1.

        0 before the first, which goes to another backend. Then a random time up to a limit that
        doubles, so that requests that failed together do not come back together.
        """
        if retry <= 1:
            return 0.0
        # The exponent is bounded: a float overflows beyond 2**1023.
        limit = _BACKOFF_S * 2.0 ** min(retry - 2, 64)
        return self._rng.uniform(0.0, min(limit, _MAX_BACKOFF_S))
