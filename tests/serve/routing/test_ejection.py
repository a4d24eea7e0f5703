"""Tests the Retry-After that a client gets, by the reason why a backend is unavailable."""

import pytest

from serve.members.proof_state import MemberProof, ProofState
from tests.serve.routing.stand_ins import Server, pool_of


@pytest.mark.parametrize(
    ("state", "probing", "due_in_s", "wait"),
    [
        ("unproven", True, -5.0, 1.5),  # what a probe took the last time
        ("unproven", False, 7.0, 8.5),
        ("refused", False, 40.0, 41.5),
        ("refused", False, 500.0, 60.0),
        ("proven", False, 300.0, 0.1),
        ("admitted", False, 300.0, 0.1),
    ],
)
def test_one_without_proof_is_asked_when_its_next_probe_has_ended(
    state: ProofState, probing: bool, due_in_s: float, wait: float
) -> None:
    pool, clock = pool_of([Server()])
    (member,) = pool.members
    clock.now = 100.0
    proof = member.proof = MemberProof("x", "a", clock)
    proof.state, proof.probing, proof.seconds = state, probing, 1.5
    proof.next_at = clock.now + due_in_s
    assert pool.retry_after_s() == pytest.approx(wait)


def test_where_no_probe_has_ended_yet_a_guess_is_told() -> None:
    pool, clock = pool_of([Server()])
    pool.members[0].proof = MemberProof("x", "a", clock)
    assert pool.retry_after_s() == 2.0
