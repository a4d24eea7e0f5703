"""The circuit breaker: what opens it, for how long, and what closes it again."""

from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octet.errors import FailureKind
from serve.config import Ejection
from serve.members.breaker import Breaker
from tests.serve.clock import Clock

COUNTED: tuple[FailureKind, ...] = ("refused", "lost", "timeout", "failed", "garbled")


def breaker(**settings: Any) -> tuple[Breaker, Clock]:
    clock = Clock(0.0)
    return Breaker(Ejection(**settings), clock=clock), clock


def fail(it: Breaker, times: int = 1, kind: FailureKind = "failed") -> None:
    for _ in range(times):
        it.failed(it.begin(), kind)


@pytest.mark.parametrize("kind", COUNTED)
def test_failures_in_a_row_open_it(kind: FailureKind) -> None:
    it, _ = breaker(failures=3)
    fail(it, 2, kind)
    it.succeeded(it.begin())
    fail(it, 2, kind)
    assert it.state == "closed"
    fail(it, 1, kind)
    assert it.state == "open" and not it.admits


def test_half_open_lets_one_through_and_its_outcome_decides() -> None:
    it, clock = breaker(failures=1, duration_s=5)
    early = it.begin()
    fail(it)
    clock.now = 4.99
    assert not it.admits
    clock.now = 5.0
    assert it.state == "half_open"
    trial = it.begin()
    assert not it.admits
    it.succeeded(trial)
    assert it.state == "closed" and it.admits
    it.failed(early, "failed")  # began before it was opened
    assert it.state == "closed"
    assert it.transitions == {
        ("closed", "open"): 1,
        ("open", "half_open"): 1,
        ("half_open", "closed"): 1,
    }


def test_what_began_before_it_opened_closes_nothing() -> None:
    it, clock = breaker(failures=1, duration_s=5)
    old = it.begin()
    fail(it)
    it.succeeded(old)
    assert it.state == "open"
    clock.now = 5
    assert it.state == "half_open"
    it.succeeded(old)
    it.abandoned(old)
    assert it.state == "half_open"
    it.begin()
    assert not it.admits


def test_a_trial_whose_client_went_away_leaves_room_for_another() -> None:
    it, clock = breaker(failures=1, duration_s=5)
    fail(it)
    clock.now = 5
    trial = it.begin() if it.admits else -1
    assert not it.admits
    it.abandoned(trial)
    assert it.state == "half_open" and it.admits
    it.failed(it.begin(), "overloaded")  # neither well nor ill
    assert it.state == "half_open" and it.admits


def test_each_ejection_is_longer_up_to_a_maximum_and_a_quiet_time_forgives() -> None:
    it, clock = breaker(failures=1, duration_s=5, max_duration_s=12)
    lasted = []
    for _ in range(4):
        fail(it)
        lasted.append(it.until - clock.now)
        clock.now = it.until
        assert it.state == "half_open"
    assert lasted == [5, 10, 12, 12]
    it.succeeded(it.begin())
    clock.now += 11.9
    fail(it)
    assert it.until - clock.now == 12
    clock.now = it.until
    it.succeeded(it.begin() if it.admits else -1)
    clock.now += 12
    fail(it)
    assert it.until - clock.now == 5


def test_a_new_process_has_a_clean_record() -> None:
    it, _ = breaker(failures=2)
    old = it.begin()
    fail(it)
    it.reset()
    it.failed(old, "lost")
    fail(it)
    assert it.state == "closed"


def test_who_was_ejected_by_a_fact_and_fails_its_trial_stays_out_however_few_are_left() -> None:
    it = Breaker(Ejection(duration_s=5), clock=(clock := Clock(0.0)), may_open=lambda: False)
    fail(it, kind="dead")
    clock.now = 5
    assert it.state == "half_open"
    fail(it)
    assert it.state == "open"


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.just(0)),
        st.tuples(st.sampled_from(("succeed", "abandon", *COUNTED, "overloaded", "dead")),
                  st.integers(0, 20)),
        st.tuples(st.just("wait"), st.integers(1, 30)),
        st.tuples(st.sampled_from(("trip", "proved", "reset", "spare")), st.just(0)),
    ),
    max_size=80,
)  # fmt: skip


@given(STEPS, st.booleans())
def test_whatever_happens_it_admits_one_trial_at_a_time(
    steps: list[tuple[str, int]], probed: bool
) -> None:
    """And never opens without a failure, and never for longer than the maximum."""
    it, clock = breaker(failures=3, duration_s=5, max_duration_s=12)
    it.probed = probed
    changes: list[None] = []
    it._changed = lambda: changes.append(None)
    running: list[int] = []
    for step, argument in steps:
        before, admitted, heard = it.state, it.admits, len(changes)
        if step == "begin":
            if it.admits:
                running.append(it.begin())
        elif step == "wait":
            clock.now += argument
        elif step in ("trip", "proved", "reset", "spare"):
            getattr(it, step)()
        elif running:
            epoch = running.pop(argument % len(running))
            if step == "succeed":
                it.succeeded(epoch)
            elif step == "abandon":
                it.abandoned(epoch)
            else:
                it.failed(epoch, cast(FailureKind, step))
        assert it.until <= clock.now + 12
        assert (it.state == "open") <= (not it.admits)
        if it.state == "half_open":
            trials = running.count(it.epoch)
            assert trials <= 1 and it.admits == (trials < 1)
        if it.state == "open" and before != "open":
            assert step in (*COUNTED, "dead", "trip")
        if it.admits != admitted and step != "wait":
            assert len(changes) > heard  # who keeps a list of the available is told
