"""Failures that are counted may be the requests' fault: they never take the last that serves."""

import math
from collections.abc import Sequence

from serve.members.member import Member

__all__ = ["may_eject", "spare_the_last"]


def may_eject(candidate: Member, members: Sequence[Member], max_fraction: float) -> bool:
    """Whether its failures may eject `candidate`: others serve, and few of them are ejected."""
    others = [m for m in members if m is not candidate and m.reachable and m.ready]
    ejected = sum(member.breaker.counted for member in others)
    allowed = max(1, math.floor(max_fraction * len(members) + 1e-9))
    return ejected < allowed and any(m.standing in ("in", "full") for m in others)


def spare_the_last(members: Sequence[Member]) -> None:
    """Lets in again who was ejected while others served, if none of these does any more."""
    if any(member.standing in ("in", "full") or member.doubtful for member in members):
        return
    for member in members:
        if member.breaker.counted and member.reachable and member.ready:
            member.breaker.spare()
