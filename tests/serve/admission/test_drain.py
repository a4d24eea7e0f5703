"""`Retry-After` against what really happens, in a simulated pool."""

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.admission.token_gate import LONGEST_WAIT_S, DrainRate


def simulate(
    drain: DrainRate, sizes: list[int], *, limit: int, rate: float, until: float
) -> tuple[float, int, int]:
    """A pool that decodes `rate` tokens per second in all, and always has as many as fit.

    The time, the tokens under way and what was served at `until`, with the drain told of all.
    """
    now, tokens, served, turn = 0.0, 0, 0, 0
    running: list[tuple[float, float, int]] = []  # end, start, tokens
    while True:
        while tokens + sizes[turn % len(sizes)] <= limit:
            size = sizes[turn % len(sizes)]
            turn += 1
            tokens += size
            # Little's law: with the budget full, a token stays limit / rate seconds.
            heapq.heappush(running, (now + limit / rate, now, size))
        if running[0][0] > until:
            return until, tokens, served
        now, since, size = heapq.heappop(running)
        drain.left(size, now - since, tokens, now)
        tokens -= size
        served += size


@given(
    st.lists(st.integers(50, 400), min_size=3, max_size=20),
    st.floats(20, 2000),
    st.integers(500, 20_000),
)
def test_the_wait_is_roughly_what_it_takes(sizes: list[int], rate: float, before: int) -> None:
    limit = 4000
    drain = DrainRate()
    drain.queued(limit, 0.0)
    now, tokens, served = simulate(drain, sizes, limit=limit, rate=rate, until=12.3 * limit / rate)
    told = drain.wait_s(before, tokens, now)
    true = before / (served / now)
    # Requests end together, in batches: at worst one has just gone, or is just about to.
    assert max(1.0, true / 2) - 1e-6 <= told <= max(1.0, 2 * true)


def test_a_queue_that_has_just_formed_goes_by_littles_law() -> None:
    drain = DrainRate()
    for _ in range(20):
        drain.left(100, 4.0, 100, 50.0)  # nobody waited: a token stays 4 s
    drain.queued(1000, 60.0)
    assert drain.wait_s(500, 1000, 60.0) == pytest.approx(2.0)  # 250 tokens per second


def test_a_backend_that_stands_still_shows() -> None:
    drain = DrainRate()
    for second in range(20):
        drain.left(100, 1.0, 100, float(second))
    drain.queued(100, 20.0)
    told = [drain.wait_s(300, 100, 20.0 + still) for still in (0, 10, 20, 40, 600)]
    assert told == sorted(told) and told[0] == pytest.approx(3.0)
    assert told[2] > 60 and told[-1] == LONGEST_WAIT_S


def test_before_anything_has_left_it_is_as_long_again() -> None:
    drain = DrainRate()
    drain.queued(1000, 0.0)
    assert drain.wait_s(500, 1000, 0.0) == 1.0
    assert drain.wait_s(500, 1000, 25.0) == 25.0
    drain.left(250, 30.0, 1000, 30.0)
    assert drain.wait_s(500, 1000, 30.0) == pytest.approx(15.0)  # 1000 tokens in 30 s


def test_a_fast_pool_is_never_told_as_zero() -> None:
    drain = DrainRate()
    drain.left(10_000, 0.0001, 10_000, 1.0)
    assert drain.wait_s(1, 10_000, 1.0) == 1.0


@pytest.mark.parametrize("faster", [0.25, 4.0])
def test_a_change_of_pace_is_followed(faster: float) -> None:
    drain = DrainRate()
    for _ in range(20):
        drain.left(100, 4.0, 400, 0.0)
    drain.queued(400, 0.0)
    assert drain.wait_s(1000, 400, 0.0) == pytest.approx(10.0)
    now = 0.0
    for _ in range(400):
        now += 1.0 / faster
        drain.left(100, 4.0 / faster, 400, now)
    assert drain.wait_s(1000, 400, now) == pytest.approx(10.0 / faster, rel=0.2)
