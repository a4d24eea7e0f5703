"""The clock of the loop that tests run on."""

import asyncio
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
