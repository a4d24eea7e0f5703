"""Measures the longest step of an event loop: while it runs, no other request gets a turn."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

__all__ = ["MOST_S", "Steps", "least_longest_step", "least_seconds", "longest_step"]

MOST_S = 0.02  # the longest step that a backend or a client may cause
_TRIES = 10


class Steps:
    """The longest step until now, in seconds of this thread's processor time."""

    longest_s = 0.0


@asynccontextmanager
async def longest_step() -> AsyncIterator[Steps]:
    """Measures every callback of asyncio's own loop; other programs on the machine do not count.

    The step in which a block begins or ends is one of its own.
    """
    steps, run = Steps(), asyncio.Handle._run  # type: ignore[attr-defined]

    def timed(handle: Any) -> None:
        began = time.thread_time()
        run(handle)
        steps.longest_s = max(steps.longest_s, time.thread_time() - began)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.Handle, "_run", timed)
        await asyncio.sleep(0)
        yield steps
        await asyncio.sleep(0)


async def least_longest_step(run: Callable[[], Awaitable[object]]) -> float:
    """Returns the longest step of `run`, in seconds: the least of up to ten runs.

    Programs that share a core's caches make single steps twice as long.
    """
    found: list[float] = []
    while len(found) < _TRIES and min(found, default=MOST_S) >= MOST_S:
        async with longest_step() as steps:
            await run()
        found.append(steps.longest_s)
    return min(found)


def least_seconds(call: Callable[[], object]) -> float:
    """Returns the processor time of `call`, which is one step: the least of up to ten calls."""
    found: list[float] = []
    while len(found) < _TRIES and min(found, default=MOST_S) >= MOST_S:
        began = time.thread_time()
        call()
        found.append(time.thread_time() - began)
    return min(found)
