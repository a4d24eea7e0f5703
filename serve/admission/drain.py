"""How fast tokens leave a pool, and so when there is room again."""

import math

__all__ = ["DrainRate"]

KEPT = 0.8  # of the mean stay's past, at each request that ends
STAYS = 4  # the rate looks back over so many mean stays: requests of one batch end together
SHORTEST_S = 5.0  # but at least so far
LONGEST_WAIT_S = 600.0


class DrainRate:
    """Tokens per second, counted while something waits: else it is the demand that is measured.

    When a queue forms, the first estimate is Little's law: what is in flight, divided by the mean
    time that a token of it stays. From then on it is an exponentially weighted average of what
    really leaves, so that a backend that stands still shows.
    """

    __slots__ = ("_at", "_rate", "_since", "_stayed", "_tokens")

    def __init__(self) -> None:
        self._stayed = 0.0  # token seconds of requests that ended, decayed
        self._tokens = 0.0  # and their tokens
        self._since: float | None = None  # when the queue formed
        self._rate: float | None = None  # tokens per second at `_at`; None: none has ever left
        self._at = 0.0

    @property
    def stay_s(self) -> float:
        """The mean time that a token is in flight; 0 before any has left."""
        return self._stayed / self._tokens if self._tokens else 0.0

    def queued(self, in_flight: int, now: float) -> None:
        """A queue has formed while `in_flight` tokens were under way."""
        self._at = self._since = now
        self._rate = self._by_stay(in_flight)

    def emptied(self) -> None:
        """Nothing waits any more."""
        self._since = None

    def left(self, tokens: int, stay_s: float, in_flight: int, now: float) -> None:
        """A request of `tokens`, one of `in_flight` in all, has ended after `stay_s`."""
        self._stayed = KEPT * self._stayed + tokens * stay_s
        self._tokens = KEPT * self._tokens + tokens
        if self._since is None:
            return
        if self._rate is None:
            self._rate = self._by_stay(in_flight)
        else:
            self._rate = self._decayed(self._rate, now) + tokens / self._span_s
        self._at = now

    def wait_s(self, tokens: int, in_flight: int, now: float) -> float:
        """Seconds until `tokens` have left; at least 1, at most ten minutes."""
        if self._since is None:
            rate = self._by_stay(in_flight)
        else:
            rate = self._rate if self._rate is None else self._decayed(self._rate, now)
        if rate is not None:
            wait_s = tokens / rate if rate else math.inf
        else:  # nothing has left yet: it will probably take as long again
            wait_s = now - self._since if self._since is not None else 0.0
        return min(max(wait_s, 1.0), LONGEST_WAIT_S)

    def _by_stay(self, in_flight: int) -> float | None:
        return in_flight / max(self.stay_s, 1e-3) if self._tokens else None

    def _decayed(self, rate: float, now: float) -> float:
        return rate * math.exp(-(now - self._at) / self._span_s)

    @property
    def _span_s(self) -> float:
        return max(SHORTEST_S, STAYS * self.stay_s)
