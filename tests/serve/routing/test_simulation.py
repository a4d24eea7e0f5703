"""Simulates servers to show what the policies are for; deterministic, by seeds."""

import pytest

from serve.routing import policies
from tests.serve.routing.simulation import Outcome, conversations, simulate, uneven


@pytest.mark.parametrize("seed", [5, 6])
def test_counting_tokens_or_asking_the_servers_beats_turns_on_uneven_requests(seed: int) -> None:
    """At 70 to 80 % of the cache in use: a third of round robin's p99 wait, or less."""
    requests = uneven(3000, rate=12, seed=seed)
    p99_s = {
        policy: simulate(policy, requests).wait_s(0.99)
        for policy in ("round_robin", "least_tokens", "power_of_two")
    }
    assert p99_s["round_robin"] > 20
    assert p99_s["least_tokens"] < p99_s["round_robin"] / 3
    assert p99_s["power_of_two"] < p99_s["round_robin"] / 3


@pytest.mark.parametrize("seed", [5, 6])
def test_only_the_servers_know_of_the_traffic_of_others(seed: int) -> None:
    """A quarter of the load reaches one server past this gateway."""
    requests = uneven(3000, rate=14, seed=seed, others=4)
    ours, theirs = (simulate(p, requests).wait_s(0.99) for p in ("least_tokens", "power_of_two"))
    assert theirs < ours / 4


def test_prefix_affinity_finds_what_is_cached_within_its_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hits rise with the load factor, and nobody is given more than that many means."""
    requests = conversations(3000, rate=30, prefixes=300)

    def bounded_by(factor: float) -> Outcome:
        monkeypatch.setattr(policies, "LOAD_FACTOR", factor)
        return simulate("prefix", requests)

    spread = simulate("least_tokens", requests)
    bounded = {factor: bounded_by(factor) for factor in (1.1, 1.25, 2.0)}
    hits = [outcome.hits / outcome.requests for outcome in (spread, *bounded.values())]
    assert hits == sorted(hits)
    assert hits[0] < 0.6 and hits[2] > 0.75 and hits[3] > 0.85
    for factor, outcome in bounded.items():
        assert outcome.most_of_mean <= factor
    unbounded = bounded_by(1e9)
    assert unbounded.most_of_mean > 2.5  # what the bound is there for


@pytest.mark.parametrize(
    "policy", ["round_robin", "least_tokens", "power_of_two", "prefix", "session"]
)
def test_nothing_is_left_over_when_all_has_ended(policy: str) -> None:
    outcome = simulate(policy, uneven(500, rate=12))
    assert [(m.in_flight, m.outstanding_tokens) for m in outcome.pool.members] == [(0, 0)] * 8
