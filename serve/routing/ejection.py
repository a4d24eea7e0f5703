"""Waits until a backend is available, and limits which backends may be ejected.

Counted failures may be the requests' fault, so they never eject the last backend that serves.
"""

import asyncio
import contextlib
import math
from collections.abc import Callable, Sequence

from serve.config import Health
from serve.members.member import Member

__all__ = ["LONGEST_WAIT_S", "may_eject", "one_is_well", "room", "spare_the_last", "wait_s"]

LONGEST_WAIT_S = 60.0
_PROOF_S = 2.0  # approximate duration of a whole probe, used until one has ended


def wait_s(member: Member, health: Health, now: float) -> float:
    """Estimates the seconds until `member` may be available again: at least 0.1, at most 60."""
    standing, proof = member.standing, member.proof
    seconds = 0.0
    if standing == "ejected":
        seconds = member.breaker.until - now
    elif standing in ("unreachable", "not_ready"):
        # A backend that has been out for long will be out for about as long again (Lindy's law).
        since = now if member.out_since is None else member.out_since
        seconds = max(now - since, health.reconnect_s)
    elif standing in ("unproven", "refused") and proof is not None:
        until_asked_s = 0.0 if proof.asking else max(proof.next_at - now, 0.0)
        seconds = until_asked_s + (proof.seconds or _PROOF_S)
    elif standing in ("full", "trial") and member.mean_lease_s is not None:
        seconds = member.mean_lease_s / max(member.in_flight, 1)
    return min(max(seconds, 0.1), LONGEST_WAIT_S)


async def one_is_well(doubtful: Sequence[Member], timeout_s: float) -> bool:
    """Waits until one of these has been checked and is available; False if none is in time."""
    looks = [asyncio.ensure_future(member.looked_into.wait()) for member in doubtful]
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for look in asyncio.as_completed(looks):
                    await look
                    if any(member.available for member in doubtful):
                        return True
    finally:
        for each in looks:
            each.cancel()
    return False


async def room(members: Callable[[], list[Member]], moved: asyncio.Event, timeout_s: float) -> bool:
    """Waits for one of `members` to be available, while some are full; returns whether one is.

    `moved` is set whenever a member may have become available.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while not any(member.available for member in members()):
                if not any(member.standing in ("full", "trial") for member in members()):
                    return False
                moved.clear()
                await moved.wait()
            return True
    return False


def may_eject(candidate: Member, members: Sequence[Member], max_fraction: float) -> bool:
    """Decides whether counted failures may eject `candidate`.

    Another member must serve, and counted failures may eject at most `max_fraction` of all members
    (but always one).
    """
    others = [m for m in members if m is not candidate and m.reachable and m.ready]
    ejected = sum(member.breaker.counted for member in others)
    allowed = max(1, math.floor(max_fraction * len(members) + 1e-9))
    return ejected < allowed and any(m.standing in ("in", "full") for m in others)


def spare_the_last(members: Sequence[Member]) -> None:
    """Readmits members that counted failures ejected, once no other member serves any more."""
    if any(member.standing in ("in", "full") or member.doubtful for member in members):
        return
    for member in members:
        if member.breaker.counted and member.reachable and member.ready:
            member.breaker.spare()
