"""What a pool's backends are proven with, and what they have proven together."""

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from serve.members.member import Member
from serve.proof.exam import Exams
from serve.proof.prover import Prover

__all__ = ["Proven", "Provers", "proven_by"]

Provers = Mapping[Member, Prover | None]  # None: no proof is wanted


@dataclass(frozen=True)
class Proven:
    """Of the members that serve, the figures of the one that is furthest from the reference."""

    kl: float | None = None  # nats at most, with 95 % confidence; None: not known of each
    kl_low: float | None = None  # nats at least
    artifact: str | None = None  # identity of its manifest


def proven_by(members: Iterable[Member]) -> Proven:
    """Nothing where one that serves has no measured figure: a request may meet it."""
    proofs = [member.proof for member in members if member.up]
    found = [(kl, proof) for proof in proofs if proof and (kl := proof.measured_kl) is not None]
    if not found or len(found) < len(proofs):
        named = next((proof.identity for proof in proofs if proof is not None), None)
        return Proven(artifact=named)
    kl, worst = max(found, key=lambda pair: pair[0])
    assert worst.verdict is not None
    return Proven(kl, worst.verdict.measure.kl_low, worst.identity)


async def make_provers(
    members: Sequence[Member],
    exams: Exams,
    clock: Callable[[], float],
    rng: random.Random,
) -> dict[Member, Prover | None]:
    """One for each member. Raises ArtifactError for golden records that cannot be used."""
    found: dict[Member, Prover | None] = {}
    for member in members:
        exam = await exams.find(member.config)
        prover = None if exam is None else Prover(member, exam, exams.config, clock=clock, rng=rng)
        found[member] = prover
    return found


async def examined(members: Sequence[Member], provers: Provers, now: Provers) -> Provers:
    """Those of `provers` that ask for something else than `now` does, with a first admission.

    So new settings are proven before they are taken over, and nobody is out meanwhile.
    """
    changed = {m: provers[m] for m in members if _key(provers[m]) != _key(now.get(m))}
    asked = (p.admit() for m, p in changed.items() if p is not None and m.reachable and m.ready)
    await asyncio.gather(*asked)
    return changed


def _key(prover: Prover | None) -> object:
    return None if prover is None else prover.exam.key
