"""Tests the choice of each routing policy."""

import random
from collections import Counter
from typing import Any

from serve.backends.base import LoadReport
from serve.config import PoolConfig
from serve.routing import Member, Pool
from serve.routing.policies import Ask
from tests.serve.clock import Clock
from tests.serve.routing.stand_ins import servers

ASK = Ask(100)


def pool(count: int, policy: str, **routing: Any) -> tuple[Pool, Clock]:
    clock = Clock(0.0)
    config = PoolConfig.model_validate({"routing": {"policy": policy} | routing})
    it = Pool.of("p", servers(count), config, clock=clock, rng=random.Random(7))
    return it, clock


def chosen(it: Pool, ask: Ask = ASK) -> Member:
    member = it.choose(ask)
    assert member is not None
    return member


def shares(it: Pool, ask: Ask = ASK, times: int = 1000) -> list[int]:
    counts = Counter(chosen(it, ask) for _ in range(times))
    return [counts[member] for member in it.members]


def report(waiting: int, kv_usage: float | None, running: int = 10) -> LoadReport:
    return LoadReport(running, waiting, kv_usage, None if kv_usage is None else 10_000)


def test_round_robin_goes_in_turn_whatever_there_is_to_do() -> None:
    it, _ = pool(3, "round_robin")
    it.members[0].lease(1_000_000)
    assert [chosen(it).name for _ in range(5)] == ["p-1", "p-2", "p-3", "p-1", "p-2"]
    it.members[1].leave()
    assert sorted(shares(it)) == [0, 500, 500]


def test_least_tokens_counts_tokens_and_not_requests() -> None:
    it, _ = pool(3, "least_tokens")
    it.members[0].lease(5000)
    for _ in range(9):
        it.members[1].lease(100)
        it.members[2].lease(200)
    assert chosen(it) is it.members[1]


def test_least_tokens_takes_equals_in_turn() -> None:
    it, _ = pool(4, "least_tokens")
    assert shares(it) == [250] * 4
    it.members[2].lease(1)
    assert shares(it)[2] == 0


def test_power_of_two_asks_the_servers_themselves() -> None:
    """The third is busy with what another gateway sent: this one's own leases do not show it."""
    it, _ = pool(3, "power_of_two")
    for member, usage in zip(it.members, (0.2, 0.5, 0.9), strict=True):
        member.reported(report(0, usage), 0, 0)
    counts = shares(it, times=3000)
    assert counts[2] == 0  # the worst of any two
    assert 1800 < counts[0] < 2200  # two of three pairs have the best


def test_power_of_two_weighs_a_queue_by_how_fast_it_moves() -> None:
    it, _ = pool(2, "power_of_two")
    # Twenty wait for a batch of ten: two service times. One of two hundred waits: a moment.
    it.members[0].reported(report(20, 0.3, running=10), 0, 0)
    it.members[1].reported(report(1, 0.5, running=200), 0, 0)
    assert shares(it) == [0, 1000]


def test_power_of_two_adds_what_it_did_since_the_report() -> None:
    """Else all requests of a second go to whoever had least at its beginning."""
    it, _ = pool(2, "power_of_two")
    it.members[0].reported(report(0, 0.1), 0, 0)
    it.members[1].reported(report(0, 0.3), 0, 0)
    given_to: Counter[Member] = Counter()
    for _ in range(100):
        member = chosen(it)
        member.lease(100)  # a hundredth of its cache
        given_to[member] += 1
    assert given_to[it.members[0]] - given_to[it.members[1]] in (19, 20, 21)  # evened out
    it.members[0].reported(report(0, 0.1), it.members[0].outstanding_tokens, 60)
    assert chosen(it) is it.members[0]  # its word again: all that was counted is in it


def test_power_of_two_adds_it_to_the_queue_where_there_is_one() -> None:
    it, _ = pool(2, "power_of_two")
    it.members[1].lease(1000)  # in its report
    for member in it.members:
        member.reported(report(5, 0.9), member.outstanding_tokens, member.in_flight)
    it.members[0].lease(1)  # few tokens, and yet one more that waits
    assert shares(it) == [0, 1000]
    for _ in range(2):
        it.members[1].lease(1)
    assert shares(it) == [1000, 0]


def test_power_of_two_falls_back_to_its_own_count_where_reports_are_old_or_equal() -> None:
    it, clock = pool(2, "power_of_two")
    it.members[0].lease(5000)
    assert shares(it) == [0, 1000]  # nobody has said anything
    it.members[1].reported(report(9, 0.9), 0, 0)
    assert shares(it) == [0, 1000]  # one of them has not
    it.members[0].reported(report(0, 0.1), 5000, 1)
    assert shares(it) == [1000, 0]
    clock.now += 4
    assert shares(it) == [0, 1000]  # that was four seconds ago
    for member in it.members:
        member.reported(report(0, 0.5), member.outstanding_tokens, member.in_flight)
    assert shares(it) == [0, 1000]


def test_power_of_two_compares_requests_where_a_server_says_only_those() -> None:
    it, _ = pool(2, "power_of_two")
    it.members[0].reported(LoadReport(12, 0, None, None), 0, 0)
    it.members[1].reported(LoadReport(8, 2, None, None), 0, 0)
    assert shares(it) == [0, 1000]
    for _ in range(5):
        it.members[1].lease(1)
    assert shares(it) == [1000, 0]


def test_the_same_prefix_goes_to_the_same_member() -> None:
    it, _ = pool(8, "prefix")
    for number in range(50):
        ask = Ask(100, prefix=b"prompt %d" % number)
        assert max(shares(it, ask, times=20)) == 20
    asks = [Ask(100, prefix=b"prompt %d" % number) for number in range(800)]
    owners = Counter(chosen(it, ask) for ask in asks)
    assert len(owners) == 8 and max(owners.values()) < 160


def test_a_session_stays_and_requests_without_one_go_where_there_is_least_to_do() -> None:
    it, _ = pool(4, "session")
    assert sorted(shares(it, Ask(1, session="alice"))) == [0, 0, 0, 1000]
    assert shares(it, Ask(1)) == [250] * 4
    assert shares(it, Ask(1, prefix=b"the same for all")) == [250] * 4


def test_two_gateways_agree_and_only_the_keys_of_the_missing_move() -> None:
    (ours, _), (theirs, _) = pool(5, "session"), pool(5, "session")
    asks = [Ask(1, session=str(number)) for number in range(500)]
    before = [chosen(ours, ask).name for ask in asks]
    assert before == [chosen(theirs, ask).name for ask in asks]
    ours.members[3].go_out("gone", reachable=False)
    after = [chosen(ours, ask).name for ask in asks]
    moved = {new for old, new in zip(before, after, strict=True) if old != new}
    assert all(old == "p-4" for old, new in zip(before, after, strict=True) if old != new)
    assert moved == {"p-1", "p-2", "p-3", "p-5"}  # to all the others
    ours.members[3].come_in()
    assert [chosen(ours, ask).name for ask in asks] == before


def test_a_popular_key_spreads_no_further_than_the_load_factor_makes_it() -> None:
    it, _ = pool(8, "prefix")
    popular = Ask(100, prefix=b"everybody's system prompt")
    for count in range(1, 801):
        chosen(it, popular).lease(100)
        loads = [member.in_flight for member in it.members]
        assert max(loads) <= max(1.25 * count / 8 + 1, 4)
    assert sum(load > 0 for load in loads) == 7  # 800 requests, 125 at most each


def test_a_lone_request_never_makes_a_member_too_busy_for_its_keys() -> None:
    """One request of eight members' one is eight times the mean load, and nothing at all."""
    it, _ = pool(8, "prefix")
    ask = Ask(100_000, prefix=b"x")
    owner = chosen(it, ask)
    for _ in range(3):
        owner.lease(100_000)
        assert chosen(it, ask) is owner


def test_two_members_of_one_address_have_places_of_their_own() -> None:
    backends = servers(1) * 2
    config = PoolConfig.model_validate({"routing": {"policy": "session"}})
    it = Pool.of("p", backends, config)
    owners = Counter(chosen(it, Ask(1, session=str(number))) for number in range(400))
    assert len(owners) == 2 and min(owners.values()) > 100
