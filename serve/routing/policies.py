"""How the next member is chosen among those that are available: microseconds, and no waiting.

What choosing a backend needs to know of a request.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from serve.config import Routing
from serve.members.member import Member
from serve.routing.hashring import HashRing

__all__ = ["Ask", "Policy", "make_policy"]


@dataclass(frozen=True, slots=True)
class Ask:
    tokens: int  # of the prompt and of the longest answer, estimated
    # The prompt's first `routing.prefix_chars` characters; empty if they are not known.
    prefix: bytes = b""
    session: str = ""  # what the requests of one conversation have in common; empty if nothing


# A batch so small that nobody in it waits: affinity is worth more than balance up to here.
_ALWAYS_ROOM = 4  # requests
_NOISE = 0.01  # a difference of reported pressure below it says nothing


class Policy(Protocol):
    def pick(self, members: Sequence[Member], ask: Ask) -> Member:
        """One of `members`, of which there is at least one."""

    def joined(self, members: Sequence[Member]) -> None:
        """These are the pool's members now, available or not."""


class RoundRobin:
    """In turn, whatever they have to do."""

    def __init__(self) -> None:
        self._turn = -1

    def joined(self, members: Sequence[Member]) -> None:
        pass

    def pick(self, members: Sequence[Member], ask: Ask) -> Member:
        self._turn = (self._turn + 1) % len(members)
        return members[self._turn]


class LeastTokens:
    """The fewest outstanding tokens; equals in turn."""

    def __init__(self) -> None:
        self._turn = -1

    def joined(self, members: Sequence[Member]) -> None:
        pass

    def pick(self, members: Sequence[Member], ask: Ask) -> Member:
        count = len(members)
        self._turn = turn = (self._turn + 1) % count
        best = members[turn]
        least = best.outstanding_tokens
        for index in range(turn + 1 - count, turn):  # negative indices: from the turn on, around
            member = members[index]
            if member.outstanding_tokens < least:
                best, least = member, member.outstanding_tokens
        return best


class PowerOfTwo:
    """The less pressed of two drawn at random (Mitzenmacher 2001)."""

    def __init__(self, fresh_s: float, clock: Callable[[], float], rng: random.Random) -> None:
        """Reports older than `fresh_s` are not believed."""
        self._fresh_s = fresh_s
        self._clock = clock
        self._random = rng.random

    def joined(self, members: Sequence[Member]) -> None:
        pass

    def pick(self, members: Sequence[Member], ask: Ask) -> Member:
        count = len(members)
        if count == 1:
            return members[0]
        index = int(self._random() * count)
        other = int(self._random() * (count - 1))
        a, b = members[index], members[other + (other >= index)]
        oldest = self._clock() - self._fresh_s
        if a.reported_at >= oldest and b.reported_at >= oldest:
            more = _more_pressed(a, b)
            if abs(more) >= _NOISE:
                return b if more > 0 else a
        return a if a.outstanding_tokens <= b.outstanding_tokens else b


class Affinity:
    """The same key to the same member: consistent hashing with bounded loads.

    Mirrokni, Thorup, Zadimoghaddam 2018: one that has more than `load_factor` times the mean load
    is passed over for the next on the ring, so that a popular key spreads as far as it must.
    """

    def __init__(self, key: Callable[[Ask], bytes], load_factor: float) -> None:
        self._key = key
        self._load_factor = load_factor
        self._ring: HashRing[Member] = HashRing(())
        self._keyless = LeastTokens()

    def joined(self, members: Sequence[Member]) -> None:
        self._ring = HashRing((_place(member, members), member) for member in members)

    def pick(self, members: Sequence[Member], ask: Ask) -> Member:
        key = self._key(ask)
        if not key:
            return self._keyless.pick(members, ask)
        bound = -1.0
        for member in self._ring.walk(key):
            if member not in members:
                continue
            if member.in_flight < _ALWAYS_ROOM:
                return member
            if bound < 0:
                total = sum(each.outstanding_tokens for each in members)
                bound = self._load_factor * total / len(members)
            if member.outstanding_tokens <= bound:
                return member
        raise AssertionError("the least loaded has no more than the mean")


def _place(member: Member, members: Sequence[Member]) -> str:
    """By its address, so that all gateways agree; by its name too where two have the same."""
    address = member.backend.name
    alone = sum(each.backend.name == address for each in members) == 1
    return address if alone else f"{address}\0{member.name}"


def _more_pressed(a: Member, b: Member) -> float:
    """How much more pressed `a` is than `b`, by what they say; both have said something."""
    pressures = _pressure(a), _pressure(b)
    if pressures[0] is not None and pressures[1] is not None:
        return pressures[0] - pressures[1]
    return float(_requests(a) - _requests(b))


def _pressure(member: Member) -> float | None:
    """The part of the KV cache in use, and the wait for a place in the batch in service times.

    Of the requests that run, a server finishes `running` in one service time, so that is how long
    the last of `waiting` waits, times waiting / running (Little's law). A report is up to a second
    old: what was begun and ended since is added and taken off, or all requests of that second would
    go to whoever had least at its beginning. It joins the queue where there was one, and else the
    cache.
    """
    report = member.report
    if report is None or report.kv_usage is None:
        return None
    since = member.in_flight - member.reported_in_flight
    running = max(report.running, 1)
    if report.waiting:
        return report.kv_usage + max(report.waiting + since, 0) / running
    if member.capacity_tokens:
        added = (member.outstanding_tokens - member.reported_tokens) / member.capacity_tokens
    else:
        added = report.kv_usage * since / running
    return max(report.kv_usage + added, 0.0)


def _requests(member: Member) -> int:
    """Those that it has, others' too, corrected likewise."""
    report = member.report
    assert report is not None
    since = member.in_flight - member.reported_in_flight
    return max(report.running + report.waiting + since, 0)


def make_policy(
    routing: Routing, fresh_s: float, clock: Callable[[], float], rng: random.Random
) -> Policy:
    if routing.policy == "round_robin":
        return RoundRobin()
    if routing.policy == "least_tokens":
        return LeastTokens()
    if routing.policy == "power_of_two":
        return PowerOfTwo(fresh_s, clock, rng)
    if routing.policy == "prefix":
        return Affinity(lambda ask: ask.prefix, routing.load_factor)
    return Affinity(lambda ask: ask.session.encode(errors="surrogatepass"), routing.load_factor)
