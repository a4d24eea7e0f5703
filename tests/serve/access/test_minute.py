"""A limit holds over every 60 seconds, and what it promises about waiting is so."""

import math

from hypothesis import given
from hypothesis import strategies as st

from serve.access.rates import Minute

arrivals = st.lists(
    st.tuples(st.floats(0, 40, allow_nan=False), st.integers(1, 12)), min_size=1, max_size=60
)


@given(arrivals, st.integers(12, 40))
def test_no_minute_has_more_than_the_limit(arrivals: list[tuple[float, int]], limit: int) -> None:
    minute, now, taken = Minute(), 5000.25, []
    for pause, amount in arrivals:
        now += pause
        if not minute.wait_s(amount, limit, now):
            minute.add(amount, now)
            taken.append((now, amount))
    for end, _ in taken:
        assert sum(amount for at, amount in taken if end - 60 < at <= end) <= limit


@given(arrivals, st.integers(12, 40), st.integers(1, 12))
def test_what_is_refused_fits_after_the_wait_and_not_before(
    arrivals: list[tuple[float, int]], limit: int, amount: int
) -> None:
    minute, now = Minute(), 5000.25
    for pause, spent in arrivals:
        now += pause
        minute.add(spent, now)
    wait_s = minute.wait_s(amount, limit, now)
    assert 0 <= wait_s <= 61
    if wait_s > 0.01:
        assert minute.wait_s(amount, limit, now + wait_s - 0.01) > 0
    assert minute.wait_s(amount, limit, now + wait_s + 1e-6) == 0


def test_a_whole_minutes_worth_may_come_at_once() -> None:
    minute = Minute()
    assert [minute.wait_s(1, 60, 7.5) or minute.add(1, 7.5) for _ in range(60)] == [7] * 60
    assert minute.wait_s(1, 60, 7.5) == 60.5  # the slot of second 7 leaves at 68


def test_more_than_the_limit_never_fits() -> None:
    assert Minute().wait_s(61, 60, 0.0) == math.inf


@given(arrivals)
def test_true_counts_replace_estimates(arrivals: list[tuple[float, int]]) -> None:
    minute, now = Minute(), 300.0
    for pause, amount in arrivals:
        now += pause
        slot = minute.add(amount, now)
        minute.correct(slot, -amount, now + 1)
        now += 1
    assert minute.used == 0 and minute.reset_s(now) == 0


def test_a_count_that_was_too_low_is_spent_now_and_an_old_one_is_past() -> None:
    minute = Minute()
    slot = minute.add(10, 100.0)
    minute.correct(slot, 5, 130.0)
    assert minute.used == 15
    assert minute.wait_s(1, 15, 130.0) == 31  # the ten leave first
    minute.correct(slot, -10, 165.0)  # of which nothing is in the window any more
    assert minute.used == 5
    assert minute.reset_s(165.0) == 26
