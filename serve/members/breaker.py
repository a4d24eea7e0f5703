"""A circuit breaker on the outcomes of real requests.

closed → open: so many failures in a row, or one that says that nobody can be served. Each opening
lasts one `duration_s` longer than the one before, up to a maximum; a breaker that then stays closed
for that maximum starts again from the first.

open → half-open: the time has passed and, where a prober looks after the backend (`probed`), a
generated token came out too. So no client's request is spent on a server that hangs.

half-open → closed or open: a few requests at a time are let through; the first token or failure
among them decides. Requests that began before the last change of state decide nothing.
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
        """`may_open` is asked before failures of requests open it; `changed` is told of each change
        of what it admits."""
        self.config = config
        self._clock = clock
        self._may_open = may_open
        self._changed = changed
        self._state: BreakerState = "closed"
        self._failures = 0  # in a row
        self._level = 0  # openings of late: the next one lasts so many durations and one more
        self._closed_at = clock()
        self._trials = 0  # requests under way that began in this half-open period
        self.probed = False
        self.certain = False  # opened by a fact rather than by counting
        self.until = 0.0  # while open: when its time has passed, by the clock
        self.epoch = 0  # of the state: each change begins another
        self.transitions: Counter[tuple[BreakerState, BreakerState]] = Counter()

    @property
    def state(self) -> BreakerState:
        if self._state == "open" and not self.probed and self._clock() >= self.until:
            self._become("half_open")
        return self._state

    @property
    def admits(self) -> bool:
        """Whether one more request may begin."""
        state = self.state
        return state == "closed" or (state == "half_open" and self._trials < self.config.trials)

    @property
    def reopens_by_itself(self) -> bool:
        """Whether it admits requests once `until` has passed."""
        return self._state == "open" and not self.probed

    @property
    def counted(self) -> bool:
        """Whether failures in a row, and no fact, keep requests from the backend."""
        return self._state != "closed" and not self.certain

    def begin(self) -> int:
        """A request begins; its outcome is told with the epoch that this returns."""
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
        """A request that goes on has brought its first token; returns the epoch of its outcome.

        That ends the trial, or a long answer would keep everybody else waiting. It takes no
        failures back: a server may break every stream after its first token.
        """
        if epoch == self.epoch and self._state == "half_open":
            self._become("closed")
            return self.epoch
        return epoch

    def failed(self, epoch: int, kind: FailureKind, *, again: bool = False) -> bool:
        """Whether that opened it. `overloaded` is no failure: the server is well, and busy.

        `again`: the same request has failed here before, and it may be the request's fault.
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
        """The request ended without saying anything of the server: its client went away."""
        if epoch == self.epoch and self._state == "half_open":
            self._trials -= 1
            self._changed()

    def trip(self) -> None:
        """It is known that nothing can be served: opens, or stays open for longer."""
        self._open()
        self.certain = True

    def proved(self) -> None:
        """A probe generated a token. Real requests that failed want a real one to succeed."""
        if self._state == "open":
            self._become("closed" if self.certain else "half_open")
        elif self._state == "half_open" and self.certain:
            self._become("closed")

    def spare(self) -> None:
        """Nobody else is left: what it was ejected for may have been the requests' fault."""
        self._become("closed")

    def reset(self) -> None:
        """What is known is of a process that is no more."""
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
