"""How many retries a pool bears: Envoy's retry budget, and AWS's full jitter.

Retries of a struggling pool add to the load that made it struggle. So no more than a part of the
active requests may be retries at any time, and a few where there are hardly any requests.
"""

import random
from collections.abc import Callable

from serve.config import Retries

__all__ = ["RetryBudget"]


class RetryBudget:
    """Counts the retries under way in one pool."""

    def __init__(
        self,
        config: Retries,
        active: Callable[[], int],
        *,
        rng: random.Random | None = None,
    ) -> None:
        """`active` says how many requests the pool has, retries included."""
        self.config = config
        self._active = active
        self._rng = rng or random.Random()
        self.retrying = 0  # requests

    def take(self) -> bool:
        """Whether one more retry may begin; it counts until `give_back`."""
        allowed = max(self.config.min_concurrent, self.config.budget * self._active())
        if self.retrying + 1 > allowed:
            return False
        self.retrying += 1
        return True

    def give_back(self) -> None:
        """The retry has ended, one way or another."""
        assert self.retrying > 0
        self.retrying -= 1

    def backoff_s(self, retry: int) -> float:
        """How long to wait before the `retry`-th retry of a request, counted from 1.

        None before the first: it goes to another backend. Then anything up to a limit that doubles,
        so that those who failed together do not come back together.
        """
        if retry <= 1:
            return 0.0
        # The exponent is bounded: a float overflows beyond 2**1023.
        limit = self.config.backoff_s * 2.0 ** min(retry - 2, 64)
        return self._rng.uniform(0.0, min(limit, self.config.max_backoff_s))
