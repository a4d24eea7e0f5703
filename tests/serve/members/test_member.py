"""Leases: what a member has to do returns to exactly nothing, whatever happens to its requests."""

from typing import Any, get_args

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from octet.errors import BackendError, FailureKind
from serve.backends.base import LoadReport
from serve.config import HttpConfig
from serve.members.member import Lease, Member
from serve.routing.policies import Ask
from tests.serve.clock import Clock
from tests.serve.routing.stand_ins import Server, fail, pool_of, servers


def member(**settings: Any) -> tuple[Member, Clock]:
    clock = Clock(0.0)
    config = HttpConfig(type="vllm", url="http://a", **settings)
    return Member("a", "p", Server(), config, clock=clock), clock


def test_a_lease_counts_until_it_is_released_and_once() -> None:
    it, _ = member()
    first, second = it.lease(100), it.lease(50)
    assert (it.in_flight, it.outstanding_tokens, it.idle.is_set()) == (2, 150, False)
    first.succeeded()
    assert it.outstanding_tokens == 150  # its answer may still be on its way to the client
    first.release()
    first.release()
    assert (it.in_flight, it.outstanding_tokens) == (1, 50)
    second.release()
    assert (it.in_flight, it.outstanding_tokens, it.idle.is_set()) == (0, 0, True)


def test_only_the_first_outcome_of_a_lease_counts() -> None:
    it, _ = member()
    for _ in range(10):
        lease = it.lease(1)
        lease.succeeded()
        lease.failed(BackendError("late", kind="dead"))
        lease.release()
        lease.failed(BackendError("later", kind="dead"))
    assert it.standing == "in"


def test_a_member_takes_no_more_than_it_may_have() -> None:
    it, _ = member(max_in_flight=2)
    leases = [it.lease(1), it.lease(1)]
    assert it.standing == "full" and it.up and not it.available
    leases[0].release()
    assert it.standing == "in" and it.available


def test_a_trial_whose_client_leaves_after_the_first_token_changes_nothing() -> None:
    it, clock = member()
    fail(it, 5)
    clock.now = 5
    assert it.standing == "trial"
    trial = it.lease(1)
    trial.progressed()
    trial.release()
    assert it.standing == "in" and it.in_flight == 0


def test_streams_that_all_break_after_their_first_token_eject() -> None:
    it, _ = member()
    for _ in range(5):
        assert it.standing == "in"
        lease = it.lease(1)
        lease.progressed()
        lease.failed(BackendError("x", kind="garbled"))
        lease.release()
    assert it.standing == "ejected"


def test_an_error_is_over_when_it_serves_again() -> None:
    it, clock = member()
    for recover in (it.come_in, it.lease(1).progressed):
        clock.now += 1
        it.go_out("away", reachable=False)
        clock.now += 1
        assert not it.recovered and it.last_error_at == clock.now - 1
        it.reachable = it.ready = recover != it.come_in
        recover()
        assert it.recovered and it.last_error == "away"
        clock.now += 1
        it.lease(1).failed(BackendError("once"))
        assert it.standing == "in" and not it.recovered
        assert (it.last_error, it.last_error_at) == ("once", clock.now)


@pytest.mark.parametrize("kind", get_args(FailureKind))
def test_a_failure_is_remembered_for_people(kind: FailureKind) -> None:
    it, _ = member()
    it.lease(1).failed(BackendError("the reason", kind=kind))
    assert it.last_error == "the reason"
    assert (it.standing == "ejected") == (kind == "dead")


@pytest.mark.parametrize("kind", get_args(FailureKind))
def test_a_lost_connection_puts_it_out_until_the_health_check_has_looked(
    kind: FailureKind,
) -> None:
    it, _ = member()
    looks: list[None] = []
    it.on_doubt = lambda: looks.append(None)
    it.lease(1).failed(BackendError("x", kind=kind))
    lost = kind in ("refused", "lost")
    assert len(looks) == lost and it.reachable == (not lost)
    it.come_in()
    assert it.reachable and it.available == (kind != "dead")


def test_without_a_health_check_nobody_would_bring_it_back_so_only_the_breaker_counts() -> None:
    it, _ = member()
    it.lease(1).failed(BackendError("x", kind="lost"))
    assert it.available


def test_tokens_and_answers_are_signs_of_life_and_failures_are_not() -> None:
    it, clock = member()
    clock.now = 7
    it.lease(1).failed(BackendError("x", kind="timeout"))
    assert it.last_success < 0
    lease = it.lease(1)
    lease.progressed()
    assert it.last_success == 7
    clock.now = 9
    lease.succeeded()
    assert it.last_success == 9


def test_a_report_that_moves_is_a_sign_of_life() -> None:
    it, clock = member()
    for now, running, usage in ((1, 4, 0.5), (2, 4, 0.5), (3, 4, 0.6), (4, 4, 0.6)):
        clock.now = now
        it.reported(LoadReport(running, now, usage, 1000), 0, 0)  # its queue grows all the time
    assert it.last_stir == 3 and it.capacity_tokens == 1000
    it.reported(LoadReport(1, 0, None, None), 0, 0)
    assert it.capacity_tokens == 1000  # as it last said


class Traffic(RuleBasedStateMachine):
    """Requests, failures, health checks and time, in any order, over a pool of four."""

    def __init__(self) -> None:
        super().__init__()
        backends = servers(4)
        self.pool, self.clock = pool_of(
            backends,
            ejection={"failures": 2, "duration_s": 3},
            routing={"policy": "least_tokens"},
        )
        for member in self.pool.members[:2]:
            member.max_in_flight = 2
        for member in self.pool.members[1:3]:
            member.on_doubt = lambda: None
            member.breaker.probed = True
        self.leases: list[Lease] = []

    @rule(tokens=st.integers(0, 1000), tried=st.integers(0, 15))
    def ask(self, tokens: int, tried: int) -> None:
        skipped = [m for bit, m in enumerate(self.pool.members) if tried >> bit & 1]
        eligible = [m for m in self.pool.members if m not in skipped]
        chosen = self.pool.choose(Ask(tokens), skipped)
        if chosen is None:
            assert not any(m.available for m in eligible)
            return
        assert chosen in eligible
        if any(m.available for m in eligible):
            assert chosen.available
            fewest = min(m.outstanding_tokens for m in eligible if m.available)
            assert chosen.outstanding_tokens == fewest
        else:
            assert chosen.doubtful
        self.leases.append(chosen.lease(tokens))

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 100), kind=st.sampled_from(get_args(FailureKind)))
    def fail(self, which: int, kind: FailureKind) -> None:
        self.leases[which % len(self.leases)].failed(BackendError("x", kind=kind))

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 100), step=st.sampled_from(("progressed", "succeeded", "release")))
    def go_on(self, which: int, step: str) -> None:
        lease = self.leases[which % len(self.leases)]
        getattr(lease, step)()
        if step == "release":
            lease.release()
            self.leases.remove(lease)

    @rule(which=st.integers(0, 3), what=st.sampled_from(("in", "out", "not_ready", "trip", "ok")))
    def check(self, which: int, what: str) -> None:
        member = self.pool.members[which]
        if what == "in":
            member.come_in()
        elif what == "trip":
            member.breaker.trip()
        elif what == "ok":
            member.breaker.proved()
        else:
            member.go_out("x", reachable=what == "not_ready")

    @rule(seconds=st.integers(0, 5))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds

    @invariant()
    def counts_are_those_of_the_open_leases(self) -> None:
        for member in self.pool.members:
            mine = [lease for lease in self.leases if lease.member is member]
            assert member.in_flight == len(mine)
            assert member.outstanding_tokens == sum(lease.tokens for lease in mine)
            assert member.idle.is_set() == (not mine)

    @invariant()
    def there_is_a_time_to_come_back(self) -> None:
        assert 0 < self.pool.retry_after_s() <= 60

    def teardown(self) -> None:
        for lease in self.leases:
            lease.release()
        assert [m.in_flight for m in self.pool.members] == [0] * 4
        assert [m.outstanding_tokens for m in self.pool.members] == [0] * 4


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_an_ejection_is_logged_once_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    it, _ = member()
    for _ in range(9):
        it.lease(1).failed(BackendError("500: out of luck"))
    assert [record.getMessage() for record in caplog.records] == [
        "p/a is ejected: 500: out of luck"
    ]
