"""Tests the Retry-After of refused requests, and which requests are refused at once."""

import asyncio

import pytest

from octet.errors import RequestError
from tests.serve.admission.gates import asked, busy, enter, make_gate
from tests.serve.routing.virtual_time import virtual


@virtual
async def test_a_full_queue_refuses_with_the_time_it_takes() -> None:
    gate, loop = make_gate(100), asyncio.get_running_loop()
    await enter(gate, 100)
    tasks = await asked(*(enter(gate, 100) for _ in range(6)))
    for _ in range(3):  # 100 tokens leave every 4 s
        await asyncio.sleep(4)
        gate.leave(100, 4.0)
        await asyncio.sleep(0)
    with pytest.raises(RequestError) as caught:
        await enter(gate, 100, max_queue=3)
    error = caught.value
    assert (error.status, error.code) == (503, "overloaded")
    assert "the queue of 'pool' is full: 3 requests wait" in str(error)
    # Three wait, one is under way: its own turn comes after 4 of them.
    assert error.retry_after_s == pytest.approx(16, rel=0.5)
    until, told = loop.time() + error.retry_after_s, 0
    while gate.queue:
        await asyncio.sleep(4)
        gate.leave(100, 4.0)
        told += 1
    assert loop.time() <= until + 8
    await asyncio.gather(*tasks)


@virtual
async def test_who_is_refused_need_not_stay_away_longer_than_anybody_waits() -> None:
    gate = await busy(100, 60.0)
    (waiting,) = await asked(enter(gate, 10, max_wait_s=100.0))
    with pytest.raises(RequestError, match="is full") as full:
        await enter(gate, 60, max_queue=1, max_wait_s=30.0)
    with pytest.raises(RequestError, match="had no capacity within 25 s") as late:
        await enter(gate, 60, "other", max_wait_s=25.0)
    # By the rate alone it is 42 s; but who waits now will not wait then.
    assert (full.value.retry_after_s, late.value.retry_after_s) == (30.0, 25.0)
    waiting.cancel()


@virtual
async def test_who_cannot_be_served_in_time_is_told_at_once() -> None:
    gate, loop = await busy(100, 8.0), asyncio.get_running_loop()
    flood = await asked(*(enter(gate, 50, "flood", max_wait_s=60.0) for _ in range(10)))
    # 500 tokens before it and its own 50 take 44 s; twice as fast would be 22.
    with pytest.raises(RequestError) as caught:
        await enter(gate, 50, "flood", max_wait_s=20.0)
    error = caught.value
    assert (error.status, error.code, loop.time()) == (503, "overloaded", 0.0)
    assert str(error) == "'pool' will have no capacity within 20 s" and error.retry_after_s == 20.0
    # Of another key, or before the others, it has only the request under way to wait for.
    others = await asked(
        enter(gate, 50, "quiet", max_wait_s=20.0),
        enter(gate, 50, "flood", priority=1, max_wait_s=20.0),
        enter(gate, 50, "flood", max_wait_s=30.0),
    )
    assert not any(task.done() for task in (*flood, *others))
    gate.leave(100, 8.0)
    gate.leave(50, 8.0)
    await asyncio.gather(*others[:2])
    for task in (*flood, *others):
        task.cancel()


@virtual
async def test_a_large_request_waits_for_what_is_under_way_alone() -> None:
    gate = await busy(100, 8.0)
    (large,) = await asked(enter(gate, 10_000, max_wait_s=20.0))
    gate.leave(100, 8.0)
    await large


@virtual
async def test_the_time_told_counts_the_room_there_is() -> None:
    gate = make_gate(1000)
    for _ in range(10):
        gate.drain.left(100, 4.0, 1000, 0.0)  # a token stays 4 s
    await enter(gate, 400)
    (large,) = await asked(enter(gate, 700))
    # 700 before it and 200 of its own, 600 of which have room; 400 in flight leave in 4 s.
    assert gate.retry_after_s(200) == pytest.approx(3.0)
    assert gate.retry_after_s(200, priority=1) == 1.0  # which the large one does not stand before
    gate.leave(400, 4.0)
    await large


@virtual
async def test_nobody_is_told_to_come_later_because_of_a_start() -> None:
    gate = await busy(100, 8.0)
    flood = await asked(*(enter(gate, 50, max_wait_s=60.0) for _ in range(10)))
    waiting = await asked(enter(gate, 50, max_wait_s=20.0, starting=lambda: True))
    assert not waiting[0].done()
    with pytest.raises(RequestError, match="will have no capacity within 20 s"):
        await enter(gate, 50, max_wait_s=20.0)
    gate.leave(100, None)  # its client went away before the start was over
    assert gate.drain.stay_s == pytest.approx(8.0)
    for task in (*flood, *waiting):
        task.cancel()
