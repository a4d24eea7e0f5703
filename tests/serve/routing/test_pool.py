"""Pools: who is available, and when somebody will be."""

import pytest

from octet.errors import BackendError
from serve.backends.base import LoadReport
from serve.config import PoolConfig
from serve.routing import Pool
from serve.routing.policies import Ask
from tests.serve.routing.stand_ins import Server, fail, pool_of, servers

ASK = Ask(10)


def test_who_was_tried_is_not_chosen_again() -> None:
    it, _ = pool_of(servers(3))
    first, second, _ = it.members
    assert it.choose(ASK, {first, second}) is it.members[2]
    assert it.choose(ASK, it.members) is None


def test_nobody_is_chosen_who_cannot_serve() -> None:
    it, clock = pool_of(servers(5), ejection={"failures": 1, "duration_s": 5})
    unreachable, not_ready, ejected, leaving, well = it.members
    unreachable.go_out("x", reachable=False)
    not_ready.go_out("x", reachable=True)
    fail(ejected)
    leaving.leave()
    assert {it.choose(ASK) for _ in range(10)} == {well}
    ejected.breaker.trip()
    well.go_out("x", reachable=False)
    assert it.choose(ASK) is None and not it.ready
    clock.now = 10.0
    assert it.choose(ASK) is ejected and ejected.standing == "trial"
    ejected.lease(1)
    assert it.choose(ASK) is None and it.ready  # one trial at a time


def test_failures_eject_no_more_than_a_part_of_the_pool() -> None:
    it, _ = pool_of(servers(4), ejection={"failures": 2, "max_fraction": 0.5})
    for member in it.members:
        fail(member, 5)
    assert [m.standing for m in it.members] == ["ejected", "ejected", "in", "in"]
    it.members[0].go_out("x", reachable=False)  # no longer counted
    fail(it.members[2])
    assert it.members[2].standing == "ejected"


def test_one_of_several_is_always_allowed_to_be_ejected() -> None:
    it, _ = pool_of(servers(2), ejection={"failures": 1, "max_fraction": 0.0})
    for member in it.members:
        fail(member)
    assert [m.standing for m in it.members].count("ejected") == 1


@pytest.mark.parametrize("reachable", [True, False])
def test_the_last_that_serves_is_not_ejected_for_what_requests_did_to_it(reachable: bool) -> None:
    """They may be one client's poison: a prompt that the server answers with 500."""
    it, _ = pool_of(servers(3), ejection={"failures": 1, "max_fraction": 1.0})
    last, out, tripped = it.members
    out.go_out("x", reachable=reachable)
    tripped.breaker.trip()
    fail(last, 100)
    assert it.choose(ASK) is last
    last.lease(1).failed(BackendError("Stub process is not healthy", kind="dead"))
    assert it.choose(ASK) is None


@pytest.mark.parametrize("ejected_s", [0, 5], ids=["ejected", "on trial"])
@pytest.mark.parametrize("how", ["down", "dead", "removed"])
def test_who_was_ejected_for_what_requests_did_to_it_is_back_when_it_is_the_last(
    how: str, ejected_s: float
) -> None:
    it, clock = pool_of(servers(2), ejection={"failures": 1, "duration_s": 5})
    last, other = it.members
    fail(last)
    clock.now = ejected_s
    assert it.choose(ASK, (other,)) is (last if ejected_s else None)
    if how == "down":
        other.go_out("x", reachable=False)
    elif how == "dead":
        other.breaker.trip()
    else:
        it._take([last])
    assert it.ready and last.standing == "in"
    leases = [last.lease(1) for _ in range(3)]
    assert it.choose(ASK) is last  # with no trial to wait for
    for lease in leases:
        lease.failed(BackendError("x"))
    assert it.choose(ASK) is last
    if how == "down":
        other.come_in()
        fail(last)
        assert last.standing == "ejected"


def test_who_was_ejected_stays_out_while_the_last_connection_is_looked_into() -> None:
    it, _ = pool_of(servers(2), ejection={"failures": 1})
    ejected, other = it.members
    fail(ejected)
    other.on_doubt = lambda: None
    other.doubt("lost")
    assert it.choose(ASK) is other and ejected.standing == "ejected"
    other.come_in()
    assert it.choose(ASK) is other and ejected.standing == "ejected"


def test_a_member_that_is_being_looked_into_is_better_than_nobody() -> None:
    it, _ = pool_of(servers(2))
    first, second = it.members
    for member in it.members:
        member.on_doubt = lambda: None
    first.lease(1).failed(BackendError("x", kind="lost"))
    assert {it.choose(ASK) for _ in range(5)} == {second}
    second.go_out("gone", reachable=False)
    assert it.choose(ASK) is first and it.choose(ASK, (first,)) is None
    first.go_out("gone", reachable=False)
    assert it.choose(ASK) is None


def test_it_says_when_to_come_back() -> None:
    it, clock = pool_of(servers(2), ejection={"failures": 1, "duration_s": 8, "max_fraction": 1})
    first, second = it.members
    fail(first)
    second.go_out("x", reachable=False)
    assert it.retry_after_s() == 0.5  # the next try to reach it
    clock.now = 6
    assert it.retry_after_s() == pytest.approx(2)  # until the ejection ends
    second.max_in_flight = 1
    second.come_in()
    second.lease(1)
    clock.now = 7
    assert second.standing == "full" and it.retry_after_s() < 1
    assert Pool.of("empty", []).retry_after_s() == 60


def test_a_full_member_has_room_about_when_its_next_request_ends() -> None:
    it, clock = pool_of(servers(1))
    (member,) = it.members
    member.max_in_flight = 4
    for _ in range(50):
        lease = member.lease(1)
        clock.now += 8
        lease.release()
    for _ in range(4):
        member.lease(1)
    assert it.retry_after_s() == pytest.approx(2)  # four that take 8 s each


def test_capacity_is_that_of_who_serves() -> None:
    it, _ = pool_of(servers(3))
    assert it.capacity_tokens is None
    it.members[0].reported(LoadReport(0, 0, 0.0, 1000), 0, 0)
    assert it.capacity_tokens == 3000  # the others are taken for the same
    it.members[1].reported(LoadReport(0, 0, 0.0, 2000), 0, 0)
    it.members[2].reported(LoadReport(0, 0, 0.0, 6000), 0, 0)
    assert it.capacity_tokens == 9000
    it.members[2].go_out("x", reachable=False)
    assert it.capacity_tokens == 3000
    for member in it.members:
        member.go_out("x", reachable=False)
    assert it.capacity_tokens == 9000  # a limit does not vanish with the last of them


def test_the_context_is_the_shortest_that_is_known() -> None:
    backends = [Server("a"), Server("b", context_length=100), Server("c", context_length=50)]
    assert Pool.of("p", backends).context_length == 50
    assert Pool.of("p", backends[:1]).context_length is None


def test_members_are_named_by_their_configuration_or_numbered() -> None:
    config = PoolConfig.model_validate(
        {
            "precision": "fp8",
            "backends": [
                {"type": "vllm", "url": "http://a"},
                {"type": "vllm", "url": "http://b", "name": "left"},
                {"type": "openai", "url": "http://c"},
                {"type": "openai", "url": "http://d", "name": "fast-2"},
            ],
        }
    )
    it = Pool.from_config("fast", config, "m")
    assert [m.name for m in it.members] == ["fast-1", "left", "fast-3", "fast-2"]
    assert it.precision == "fp8" and it.members[1].config is config.backends[1]
    assert all(m.backend.models == ("m",) for m in it.members)
