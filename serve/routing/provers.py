"""The provers of a pool's backends, and the divergence that they have measured together."""

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from serve.members.member import Member
from serve.proof.exam import Exams
from serve.proof.prover import Prover

__all__ = ["Proven", "Provers", "proven_by"]

Provers = Mapping[Member, Prover | None]  # None: no proof is required


@dataclass(frozen=True)
class Proven:
    """Figures of the serving member that is furthest from the reference."""

    kl: float | None = None  # nats, upper bound, 95 % confidence; None: some member's is unknown
    kl_low: float | None = None  # nats, lower bound
    artifact: str | None = None  # identity of its manifest


def proven_by(members: Iterable[Member]) -> Proven:
    """Returns no figures if any serving member is unmeasured, since it may get a request."""
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
    """Makes a prover for each member, or None. Raises ArtifactError for unusable golden records."""
    found: dict[Member, Prover | None] = {}
    for member in members:
        exam = await exams.find(member.config)
        prover = None if exam is None else Prover(member, exam, exams.config, clock=clock, rng=rng)
        found[member] = prover
    return found


async def examined(members: Sequence[Member], provers: Provers, now: Provers) -> Provers:
    """Returns the `provers` whose exam differs from that in `now`, after a first admission.

    So backends are proven under new settings before these apply, and no backend is out meanwhile.
    """
    changed = {m: provers[m] for m in members if _key(provers[m]) != _key(now.get(m))}
    asked = (p.admit() for m, p in changed.items() if p is not None and m.reachable and m.ready)
    await asyncio.gather(*asked)
    return changed


def _key(prover: Prover | None) -> object:
    return None if prover is None else prover.exam.key
