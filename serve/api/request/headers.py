"""X-Octet-* headers: the tier that a client requests, and the provenance of its answer."""

from collections.abc import Mapping, Sequence

from octet.errors import RequestError
from serve.members.member import Member
from serve.routing.pool import Pool
from serve.routing.tiers import ModelTier

__all__ = ["provenance", "requested_tier"]

TIER = b"x-octet-tier"
_DIGITS = 12  # of an artifact's identity: enough to distinguish those that one gateway serves


def requested_tier(
    headers: Mapping[bytes, bytes], fields: Sequence[tuple[bytes, bytes]]
) -> str | None:
    """Returns the client's X-Octet-Tier, or None without one. `fields` are its headers as sent.

    Raises RequestError (400) if the header is there twice.
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
    """Returns the tier, precision and artifact of an answer of `member` of `pool`, as headers.

    The tier is there only if one was requested: that one or, where it allows less exact answers,
    the most exact tier that the pool fits, if any. The artifact is the one that `member` itself has
    proven, because other members of the pool may serve another. The divergence is the pool's upper
    bound, in nats.
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
