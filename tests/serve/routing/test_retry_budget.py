"""Retries never are more than a part of what goes on; and those who failed together spread out."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.config import Retries
from serve.routing.retry_budget import RetryBudget


def budget(active: int, **settings: Any) -> RetryBudget:
    return RetryBudget(Retries(**settings), lambda: active, rng=random.Random(1))


@pytest.mark.parametrize(
    ("active", "allowed"), [(0, 3), (1, 3), (15, 3), (20, 4), (24, 4), (25, 5), (1000, 200)]
)
def test_a_fifth_of_the_active_requests_and_never_fewer_than_three(
    active: int, allowed: int
) -> None:
    it = budget(active)
    assert [it.take() for _ in range(allowed + 2)] == [True] * allowed + [False] * 2
    it.give_back()
    assert it.take() and not it.take()


@given(
    st.lists(st.tuples(st.sampled_from("tga"), st.integers(0, 50)), max_size=100),
    st.floats(0, 1),
    st.integers(0, 5),
)
def test_the_retries_under_way_never_exceed_the_budget(
    steps: list[tuple[str, int]], part: float, floor: int
) -> None:
    active = 0
    it = RetryBudget(Retries(budget=part, min_concurrent=floor), lambda: active)
    taken = 0
    for step, count in steps:
        if step == "a":
            active = count
        elif step == "t":
            fits = taken + 1 <= max(floor, part * active)
            assert it.take() == fits
            taken += fits
        elif taken:
            it.give_back()
            taken -= 1
        assert it.retrying == taken


def test_the_first_retry_goes_at_once_and_later_ones_wait_for_longer_and_longer() -> None:
    it = budget(1)
    assert it.backoff_s(1) == 0
    for retry, limit in ((2, 0.025), (3, 0.05), (4, 0.1), (5, 0.2), (6, 0.25), (2000, 0.25)):
        drawn = [it.backoff_s(retry) for _ in range(2000)]
        assert 0 <= min(drawn) < 0.05 * limit and 0.95 * limit < max(drawn) <= limit
        assert sum(drawn) / len(drawn) == pytest.approx(limit / 2, rel=0.05)  # full jitter
