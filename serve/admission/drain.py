"""How fast tokens leave a pool, and so when there is room again."""

import math

__all__ = ["DrainRate"]

SMOOTHING = 0.2  # weight of the newest request in the mean stay
STAYS = 4  # the rate remembers so many mean stays, for requests of one batch end together
SHORTEST_S = 5.0  # but at least so long
LONGEST_WAIT_S = 600.0


class DrainRate:
    """Tokens per second, counted while something waits: else it is the demand that is measured.

    When a queue forms, the first estimate is Little's law: what is in flight, divided by the mean
    time that a token of it stays. From then on it is an exponentially weighted average of what
    really leaves, so that a backend that stands still shows.
    """

    __slots__ = ("_at", "_rate", "_since", "_weight", "stay_s")

    def __init__(self) -> None:
        self.stay_s: float | None = None  # of a token in flight, mean
        self._rate = 0.0  # decayed sum; divided by its weight it is tokens per second
        self._weight = 0.0
        self._at = 0.0
        self._since: float | None = None  # when the queue formed

    def queued(self, in_flight: int, now: float) -> None:
        """A queue has formed while `in_flight` tokens were under way."""
        self._at = self._since = now
        self._rate = in_flight / max(self.stay_s, 1e-3) if self.stay_s is not None else 0.0
        self._weight = 1.0 if self.stay_s is not None else 0.0

    def emptied(self) -> None:
        """Nothing waits any more."""
        self._since = None

    def left(self, tokens: int, stay_s: float, now: float) -> None:
        """A request of `tokens` has ended after `stay_s`."""
        before = stay_s if self.stay_s is None else self.stay_s
        self.stay_s = before + SMOOTHING * (stay_s - before)
        if self._since is not None:
            self._decay(now)
            self._rate += tokens / self._span_s

    def wait_s(self, tokens: int, in_flight: int, now: float) -> float:
        """Seconds until `tokens` have left; at least 1, at most ten minutes."""
        if self._since is None:
            rate = in_flight / max(self.stay_s, 1e-3) if self.stay_s is not None else 0.0
            idle_s = 0.0
        else:
            self._decay(now)
            rate = self._rate / self._weight if self._weight else 0.0
            idle_s = now - self._since
        # If nothing has ever left, it will probably take as long again as it has taken.
        wait_s = tokens / rate if rate > tokens / LONGEST_WAIT_S else idle_s or 1.0
        return min(max(wait_s, 1.0), LONGEST_WAIT_S)

    @property
    def _span_s(self) -> float:
        return max(SHORTEST_S, STAYS * (self.stay_s or 0.0))

    def _decay(self, now: float) -> None:
        kept = math.exp(-(now - self._at) / self._span_s)
        self._rate *= kept
        self._weight = self._weight * kept + (1.0 - kept)
        self._at = now
