"""A circuit breaker on the outcomes of real requests.

closed → open: `failures` failures in a row, or one that shows that no request can be served. Each
opening lasts one `duration_s` longer than the one before, up to a maximum; a breaker that then
stays closed for that maximum starts again from the first.

open → half-open: the time has passed and, if health checks probe the backend (`probed`), a probe
generated a token too. So no client's request is spent on a server that hangs.

half-open → closed or open: one request at a time is let through; its first token or failure
decides. Requests that began before the last change of state decide nothing.
"""

import time
from collections import Counter
from collections.abc import Callable
from typing import Literal, TypeAlias

from octet.errors import FailureKind
from serve.config import Ejection

__all__ = ["Breaker", "BreakerState"]

BreakerState: TypeAlias = Literal["closed", "half_open", "open"]


class Breaker:
    def __init__(
        self,
        config: Ejection,
        *,
        clock: Callable[[], float] = time.monotonic,
        may_open: Callable[[], bool] = lambda: True,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """Calls `may_open` before counted failures open it, `changed` when `admits` may change."""
        self.config = config
        self._clock = clock
        self._may_open = may_open
        self._changed = changed
        self._state: BreakerState = "closed"
        self._failures = 0  # in a row
        self._level = 0  # recent openings; the next one lasts one duration more than this many
        self._closed_at = clock()
        self._trials = 0  # requests under way that began in this half-open period
        self.probed = False
        self.certain = False  # opened by one certain failure, not by counting
        self.until = 0.0  # while open: when its time is over, by the clock
        self.epoch = 0  # of the state; each change begins a new one
        self.transitions: Counter[tuple[BreakerState, BreakerState]] = Counter()

    @property
    def state(self) -> BreakerState:
        if self._state == "open" and not self.probed and self._clock() >= self.until:
            self._become("half_open")
        return self._state

    @property
    def admits(self) -> bool:
        """Returns whether one more request may begin."""
        state = self.state
        return state == "closed" or (state == "half_open" and not self._trials)

    @property
    def reopens_by_itself(self) -> bool:
        """Returns whether it admits requests once `until` has passed, without a probe."""
        return self._state == "open" and not self.probed

    @property
    def counted(self) -> bool:
        """Returns whether counted failures, not a certain one, keep requests from the backend."""
        return self._state != "closed" and not self.certain

    def begin(self) -> int:
        """Begins a request; returns the epoch to pass along with its outcome."""
        if self.state == "half_open":
            self._trials += 1
            self._changed()
        return self.epoch

    def succeeded(self, epoch: int) -> None:
        if epoch != self.epoch:
            return
        self._failures = 0
        if self._state == "half_open":
            self._become("closed")

    def progressed(self, epoch: int) -> int:
        """Handles the first token of a running request; returns the epoch for its outcome.

        The token ends the trial, or a long answer would keep all other requests waiting. It does
        not reset the failure count: a server may break every stream after its first token.
        """
        if epoch == self.epoch and self._state == "half_open":
            self._become("closed")
            return self.epoch
        return epoch

    def failed(self, epoch: int, kind: FailureKind, *, again: bool = False) -> bool:
        """Handles a failed request; returns whether that opened the breaker.

        `overloaded` is no failure: the server is well, but busy. `again`: the same request has
        failed here before, so it may be the request's fault.
        """
        if epoch != self.epoch or self._state == "open":
            return False
        if kind == "overloaded":
            self.abandoned(epoch)
        elif kind == "dead":
            self.trip()
        elif self._state == "half_open":
            if self.certain or self._may_open():
                self._open()
            else:
                self.abandoned(epoch)
        elif not again:
            self._failures += 1
            if self._failures >= self.config.failures and self._may_open():
                self._open()
        return self.state == "open"

    def abandoned(self, epoch: int) -> None:
        """Handles a request that ended without evidence about the server: its client went away."""
        if epoch == self.epoch and self._state == "half_open":
            self._trials -= 1
            self._changed()

    def trip(self) -> None:
        """Opens, or stays open for longer: the backend certainly cannot serve anything."""
        self._open()
        self.certain = True

    def proved(self) -> None:
        """Handles a token from a probe. After counted failures a real request must succeed too."""
        if self._state == "open":
            self._become("closed" if self.certain else "half_open")
        elif self._state == "half_open" and self.certain:
            self._become("closed")

    def spare(self) -> None:
        """Closes because no other member is left: the requests may have caused the failures."""
        self._become("closed")

    def reset(self) -> None:
        """Discards the state, which belongs to a process that has ended."""
        if self._state == "closed":
            self._failures = 0
            self.epoch += 1
        else:
            self._become("closed")

    def _open(self) -> None:
        now = self._clock()
        longest = self.config.max_duration_s
        if self._state == "closed" and now - self._closed_at >= longest:
            self._level = 0
        self._level += 1
        self.until = now + min(self._level * self.config.duration_s, longest)
        self._become("open")

    def _become(self, state: BreakerState) -> None:
        if state != self._state:
            self.transitions[self._state, state] += 1
        if state == "closed":
            self._closed_at = self._clock()
        if state != "half_open":
            self.certain = False
        self._state = state
        self._failures = self._trials = 0
        self.epoch += 1
        self._changed()
