"""An event loop whose clock all but stands still while the process is held up.

A test of a deadline of 0.2 s is about who waits for whom, not about how fast the machine is. Here
0.2 s pass when the test has waited for 0.2 s with nothing to do. A machine that is busy, or stops
the process for seconds, makes the test slower and not different: whatever was to arrive in time
still does. Time that tests measure with `time.monotonic` is nobody's but the machine's.
"""

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["PatientLoop", "run"]

T = TypeVar("T")

STEP_S = 0.001  # the most that callbacks which were ready together take
WAIT_S = 0.01  # the most that waiting takes if something comes before the next timer
LOOK_S = 0.05  # so long at most nobody looks whether something has come: a stop may be as long


class PatientLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._now = self._seen = time.monotonic()  # what is told, and when it last moved
        super().__init__(_Watched(self._pass))

    def time(self) -> float:
        return self._now + min(time.monotonic() - self._seen, STEP_S)

    def _pass(self, most_s: float) -> None:
        """What has passed since the last call counts, up to `most_s`."""
        now = time.monotonic()
        self._now += min(now - self._seen, most_s)
        self._seen = now


class _Watched(selectors.DefaultSelector):
    def __init__(self, passing: Callable[[float], None]) -> None:
        super().__init__()
        self._passing = passing

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._passing(STEP_S)
        look_s = LOOK_S if timeout is None else min(timeout, LOOK_S)
        ready = super().select(look_s)
        self._passing(WAIT_S if ready else max(look_s, 0.0))
        return ready


def run(main: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`."""
    with asyncio.Runner(loop_factory=PatientLoop) as runner:
        return runner.run(main)
