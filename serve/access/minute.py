"""What was spent in the last minute, as a sliding window."""

import math

__all__ = ["Minute"]

# A second each. Two moments less than 60 s apart are at most 60 whole seconds apart, so that 61
# slots hold every minute that ends now.
SLOTS = 61


class Minute:
    """Amounts of the last minute, requests or tokens, in slots of one second.

    A token bucket that allows a minute's worth at once lets twice the limit through in some minute
    (the burst, and what flows in meanwhile). Here the sum over any 60 seconds is at most the limit,
    and a whole minute's worth may still come at once. Times are seconds of one monotonic clock.
    """

    __slots__ = ("_newest", "_slots", "used")

    def __init__(self) -> None:
        self._slots = [0] * SLOTS
        self._newest = 0  # the second of the newest slot
        self.used = 0

    def add(self, amount: int, now: float) -> int:
        """Spends `amount`; returns the slot, for `correct`."""
        self._advance(now)
        self._slots[self._newest % SLOTS] += amount
        self.used += amount
        return self._newest

    def correct(self, slot: int, difference: int, now: float) -> None:
        """Changes what was added to `slot`. Too much is taken back where it was; more counts now.

        What has left the window meanwhile is not changed.
        """
        self._advance(now)
        if difference > 0:
            self.add(difference, now)
        elif slot > self._newest - SLOTS:
            self._slots[slot % SLOTS] += difference
            self.used += difference

    def wait_s(self, amount: int, limit: int, now: float) -> float:
        """Seconds until `amount` more is within `limit`: 0 if it is now, infinity if never."""
        self._advance(now)
        excess = self.used + amount - limit
        if excess <= 0:
            return 0.0
        if amount > limit:
            return math.inf
        for second in range(self._newest - SLOTS + 1, self._newest + 1):
            excess -= self._slots[second % SLOTS]
            if excess <= 0:
                return second + SLOTS - now
        raise AssertionError("the slots do not add up to what is used")

    def reset_s(self, now: float) -> float:
        """Seconds until nothing is used."""
        self._advance(now)
        for second in range(self._newest, self._newest - SLOTS, -1):
            if self._slots[second % SLOTS]:
                return second + SLOTS - now
        return 0.0

    def _advance(self, now: float) -> None:
        """Empties the slots that the window has left."""
        second = int(now)
        if second <= self._newest:
            return
        for passed in range(max(self._newest + 1, second - SLOTS + 1), second + 1):
            self.used -= self._slots[passed % SLOTS]
            self._slots[passed % SLOTS] = 0
        self._newest = second
