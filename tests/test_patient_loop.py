"""The clock of the loop that tests run on."""

import asyncio
import threading
import time

import pytest


async def test_a_process_that_is_held_up_is_not_late() -> None:
    loop = asyncio.get_running_loop()
    arrived = loop.create_future()
    async with asyncio.timeout(0.1):
        loop.call_soon(time.sleep, 0.3)  # longer than all that is allowed
        loop.call_later(0.02, arrived.set_result, "in time")
        assert await arrived == "in time"


async def test_what_is_waited_for_takes_its_time() -> None:
    began, loop = time.monotonic(), asyncio.get_running_loop()
    before = loop.time()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await asyncio.Event().wait()
    assert loop.time() - before >= 0.049 and time.monotonic() - began >= 0.049


async def test_a_thread_that_is_slow_to_answer_is_hardly_late() -> None:
    loop, go_on = asyncio.get_running_loop(), asyncio.Event()
    timer = threading.Timer(0.2, loop.call_soon_threadsafe, (go_on.set,))
    timer.start()
    before = loop.time()
    await go_on.wait()
    assert loop.time() - before < 0.1
    timer.join()
