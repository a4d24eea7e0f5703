"""X-Octet-*: the tier that a client asks for, and what its answer came from."""

from collections.abc import Mapping, Sequence

from octet.errors import RequestError
from serve.members.member import Member
from serve.routing.pool import Pool
from serve.routing.tiers import ModelTier

__all__ = ["provenance", "requested_tier"]

TIER = b"x-octet-tier"
_DIGITS = 12  # of an artifact's identity: enough to tell those apart that one gateway serves


def requested_tier(
    headers: Mapping[bytes, bytes], fields: Sequence[tuple[bytes, bytes]]
) -> str | None:
    """The client's X-Octet-Tier; None if it names none. `fields` are its headers as they came.

    Raises RequestError (400) if it is there twice.
    """
    value = headers.get(TIER)
    if value is None:
        return None
    if len(fields) > len(headers) and sum(name == TIER for name, _ in fields) > 1:
        raise RequestError(
            "X-Octet-Tier is there twice: name one tier",
            param="X-Octet-Tier",
            code="invalid_tier",
        )
    return value.decode("latin-1")


def provenance(
    pool: Pool | None, tier: ModelTier | None, member: Member | None = None
) -> dict[str, str]:
    """Which tier, precision and artifact an answer of `member` of `pool` has, as headers.

    A tier only if one was asked for: that one, or where it allowed less, the most exact one that
    the pool fits, if any. The artifact is the one that `member` itself has proven: others of the
    pool may serve another. The divergence is the pool's upper bound, in nats.
    """
    headers: dict[str, str] = {}
    if pool is None:
        return headers
    if tier is not None and (kept := tier.kept_by(pool)) is not None:
        headers["x-octet-tier"] = kept
    if pool.precision is not None:
        headers["x-octet-precision"] = pool.precision
    proof = None if member is None else member.proof
    if proof is not None and proof.state == "proven":
        headers["x-octet-artifact"] = proof.identity[:_DIGITS]
    if (kl := pool.proven.kl) is not None:
        headers["x-octet-divergence"] = f"{kl:.4g}"
    return headers
