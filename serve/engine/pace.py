"""How fast an engine gets through its requests: what `Retry-After` is computed from."""

import time
from collections.abc import Callable

__all__ = ["Pace"]

_WEIGHT = 0.1  # of the newest interval in the moving mean
LEAST_S, MOST_S = 1.0, 60.0


class Pace:
    """The mean time between the ends of two requests, the recent ones counting most."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: float | None = None
        self._interval_s: float | None = None

    def ended(self, *, busy: bool) -> None:
        """A request ended; `busy` unless no other is left, so that idle time is not counted."""
        now = self._clock()
        if self._last is not None:
            taken = now - self._last
            before = taken if self._interval_s is None else self._interval_s
            self._interval_s = before + _WEIGHT * (taken - before)
        self._last = now if busy else None

    def until_half(self, waiting: int) -> float:
        """Seconds until half of a queue of `waiting` requests will have had its turn."""
        interval_s = self._interval_s or 0.0
        return min(max(interval_s * waiting / 2, LEAST_S), MOST_S)
