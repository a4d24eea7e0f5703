"""A pool's budget: never over it, nobody lost in the queue, nothing left behind."""

import asyncio
from typing import Any

import pytest

from octet.errors import RequestError
from tests.serve.admission.gates import asked, assert_empty, enter, full, make_gate
from tests.serve.routing.virtual_time import virtual


@virtual
async def test_with_room_nobody_waits() -> None:
    gate = make_gate(100)
    for _ in range(4):
        coroutine = enter(gate, 25)
        with pytest.raises(StopIteration):  # it ends without yielding once
            coroutine.send(None)
    assert (gate.tokens, gate.requests) == (100, 4)


@virtual
async def test_beyond_the_budget_they_wait_for_room() -> None:
    gate = make_gate(100)
    await enter(gate, 60)
    first, second = await asked(enter(gate, 50), enter(gate, 40))
    assert not first.done() and not second.done()  # the second would fit, but is not passed ahead
    gate.leave(60, 1.0)
    await asyncio.gather(first, second)
    assert gate.tokens == 90
    loop: Any = asyncio.get_running_loop()
    assert all(
        timer.cancelled() for timer in loop._scheduled
    )  # nothing waits for their `max_wait_s`


@virtual
async def test_a_request_larger_than_the_budget_goes_alone() -> None:
    gate = make_gate(100)
    await enter(gate, 1000)
    (small,) = await asked(enter(gate, 1))
    assert not small.done()
    gate.leave(1000, 1.0)
    await small
    (large,) = await asked(enter(gate, 1000))
    assert not large.done()
    gate.leave(1, 1.0)
    await large


@virtual
async def test_a_higher_priority_goes_first_and_fits_past_a_large_one() -> None:
    gate = make_gate(100)
    await enter(gate, 60)
    (large,) = await asked(enter(gate, 80))
    await enter(gate, 40, priority=1)
    assert not large.done() and gate.tokens == 100


@virtual
async def test_a_key_that_floods_the_queue_pushes_out_only_itself() -> None:
    gate = await full(10)
    flood = await asked(*(enter(gate, 1, "flood", max_queue=5) for _ in range(5)))
    (quiet,) = await asked(enter(gate, 1, "quiet", max_queue=5))
    with pytest.raises(RequestError, match="is full"):
        await flood[-1]  # its newest
    with pytest.raises(RequestError, match="is full"):
        await enter(gate, 1, "flood", max_queue=5)
    gate.leave(10, 1.0)
    assert await asyncio.gather(quiet, *flood[:4]) == ["quiet", *["flood"] * 4]


@virtual
async def test_the_wait_ends_at_its_limit_or_at_the_deadline() -> None:
    gate, loop = await full(10), asyncio.get_running_loop()
    with pytest.raises(RequestError) as caught:
        await enter(gate, 1, max_wait_s=30.0, deadline=1000.0)
    error = caught.value
    assert (error.status, error.code, loop.time()) == (503, "overloaded", 30.0)
    assert error.retry_after_s is not None and error.retry_after_s >= 1
    with pytest.raises(RequestError) as caught:
        await enter(gate, 1, max_wait_s=30.0, deadline=32.5)
    error = caught.value
    assert (error.status, error.code, loop.time()) == (504, "deadline_exceeded", 32.5)
    assert "2.500 s were spent in the queue of 'pool', none on a backend" in str(error)
    with pytest.raises(RequestError, match=r"0\.000 s were spent"):
        await enter(gate, 1, deadline=1.0)  # that was long ago
    gate.leave(10, 1.0)
    assert_empty(gate)


@virtual
async def test_a_start_is_no_part_of_the_wait_and_changes_no_turn() -> None:
    gate, loop = await full(10), asyncio.get_running_loop()

    def starting() -> bool:
        return loop.time() < 100.0

    oldest, newer = await asked(
        enter(gate, 10, max_wait_s=30.0, starting=starting),
        enter(gate, 10, max_wait_s=70.0, starting=starting),
    )
    deadline = enter(gate, 10, "other", max_wait_s=30.0, deadline=80.0, starting=starting)
    with pytest.raises(RequestError, match=r"80\.000 s were spent in the queue"):
        await deadline
    await asyncio.sleep(45.0)  # until 125 s, when the start has been over for less than 30
    gate.leave(10, 1.0)
    await oldest
    assert not newer.done()
    with pytest.raises(RequestError, match="had no capacity within 70 s"):
        await newer
    assert loop.time() == 170.0  # 70 s after the start


@virtual
async def test_a_restart_during_the_wait_is_no_part_of_it() -> None:
    gate, loop = await full(10), asyncio.get_running_loop()

    def starting() -> bool:
        return 2.0 <= loop.time() < 29.0

    with pytest.raises(RequestError, match="had no capacity within 30 s"):
        await enter(gate, 1, max_wait_s=30.0, starting=starting)
    assert 57.0 <= loop.time() <= 59.0


@virtual
async def test_one_that_gives_up_lets_the_next_try() -> None:
    gate = make_gate(100)
    await enter(gate, 60)
    large, small, late = await asked(
        enter(gate, 80), enter(gate, 30), enter(gate, 20, max_wait_s=1.0)
    )
    large.cancel()
    await asyncio.wait((small,))
    assert gate.tokens == 90
    with pytest.raises(RequestError):
        await late
    gate.leave(60, 1.0)
    gate.leave(30, 1.0)
    assert_empty(gate)


@pytest.mark.parametrize("let_in_first", [False, True])
@virtual
async def test_one_that_is_cancelled_as_it_is_let_in_gives_its_room_back(
    let_in_first: bool,
) -> None:
    gate = await full(10)
    first, second = await asked(enter(gate, 10), enter(gate, 10))
    # Let in before it is cancelled, and not yet told; or cancelled first, and not yet told.
    steps = [lambda: gate.leave(10, 1.0), first.cancel]
    for step in steps if let_in_first else reversed(steps):
        step()
    await second
    assert first.cancelled() and gate.tokens == 10
    gate.leave(10, 1.0)
    assert_empty(gate)


@virtual
async def test_a_limit_that_grows_or_goes_lets_them_in() -> None:
    gate = await full(10)
    a, b = await asked(enter(gate, 10), enter(gate, 100))
    gate.set_limit(20)
    await a
    assert not b.done()
    gate.set_limit(None)
    await b
