"""How long it may take until a backend can be asked: what clients are told to wait."""

from serve.config import Health
from serve.routing.member import Member

__all__ = ["LONGEST_WAIT_S", "wait_s"]

LONGEST_WAIT_S = 60.0
_PROOF_S = 2.0  # what a whole probe takes, about, where none has ended yet


def wait_s(member: Member, health: Health, now: float) -> float:
    """Seconds until `member` may be available again; at least a moment, at most a minute."""
    standing, proof = member.standing, member.proof
    seconds = 0.0
    if standing == "ejected":
        seconds = member.breaker.until - now
    elif standing in ("unreachable", "not_ready"):
        # Who has been away for long will be away for about as long again (Lindy's law).
        since = now if member.out_since is None else member.out_since
        seconds = max(now - since, health.reconnect_s)
    elif standing in ("unproven", "refused") and proof is not None:
        until_asked_s = 0.0 if proof.asking else max(proof.next_at - now, 0.0)
        seconds = until_asked_s + (proof.seconds or _PROOF_S)
    elif standing in ("full", "trial") and member.mean_lease_s is not None:
        seconds = member.mean_lease_s / max(member.in_flight, 1)
    return min(max(seconds, 0.1), LONGEST_WAIT_S)
