"""Policies that choose the next member among those available, in microseconds, without waiting.

`Ask` holds the properties of a request that the choice depends on, such as the prefix or session
that lets it go to the same backend again.
"""

import random
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from struct import unpack
from typing import Any, Generic, TypeVar

from serve.config import Routing
from serve.members.member import Member

__all__ = ["Ask", "HashRing", "Policy", "ask_for", "make_policy"]

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Ask:
    tokens: int  # prompt plus longest answer, estimated
    # The prompt's first `routing.prefix_chars` characters; empty if they are not known.
    prefix: bytes = b""
    session: str = ""  # shared by the requests of one conversation; may be empty


# In a smaller batch no request waits, so affinity is worth more than balance.
_SMALL_BATCH = 4  # requests
LOAD_FACTOR = 1.25  # a member with more than this times the mean load is skipped
_NOISE = 0.01  # smaller differences of reported pressure are ignored


class Policy(ABC):
    @abstractmethod
    def pick(self, members: Sequence[Member], ask: Ask) -> Member:
        """Returns one of `members`, which is not empty."""

    def joined(self, members: Sequence[Member]) -> None:  # noqa: B027
        """Called with the pool's new list of members, available or not."""


class RoundRobin(Policy):
    """Picks members in turn, whatever their load."""

    def __init__(self) -> None:
        self._turn = -1

    def pick(self, members: Sequence[Member], ask: Ask) -> Member:
        self._turn = (self._turn + 1) % len(members)
        return members[self._turn]


class LeastTokens(Policy):
    """Picks the member with the fewest outstanding tokens; ties in turn."""

    def __init__(self) -> None:
        self._turn = -1

    def pick(self, members: Sequence[Member], ask: Ask) -> Member:
        count = len(members)
        self._turn = turn = (self._turn + 1) % count
        best = members[turn]
        least = best.outstanding_tokens
        for index in range(turn + 1 - count, turn):  # negative indices wrap around
            member = members[index]
            if member.outstanding_tokens < least:
                best, least = member, member.outstanding_tokens
        return best


class PowerOfTwo(Policy):
    """Picks the less loaded of two members drawn at random (Mitzenmacher 2001)."""

    def __init__(self, fresh_s: float, clock: Callable[[], float], rng: random.Random) -> None:
        """Ignores load reports older than `fresh_s`."""
        self._fresh_s = fresh_s
        self._clock = clock
        self._random = rng.random

    def pick(self, members: Sequence[Member], ask: Ask) -> Member:
        count = len(members)
        if count == 1:
            return members[0]
        index = int(self._random() * count)
        other = int(self._random() * (count - 1))
        a, b = members[index], members[other + (other >= index)]
        oldest = self._clock() - self._fresh_s
        if a.reported_at >= oldest and b.reported_at >= oldest:
            more = _load_difference(a, b)
            if abs(more) >= _NOISE:
                return b if more > 0 else a
        return a if a.outstanding_tokens <= b.outstanding_tokens else b


class Affinity(Policy):
    """Sends the same key to the same member: consistent hashing with bounded loads.

    Mirrokni, Thorup, Zadimoghaddam 2018: a member with more than `LOAD_FACTOR` times the mean load
    is skipped for the next on the ring, so that a popular key spreads as far as it must.
    """

    def __init__(self, key: Callable[[Ask], bytes]) -> None:
        self._key = key
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
            if member.in_flight < _SMALL_BATCH:
                return member
            if bound < 0:
                total = sum(each.outstanding_tokens for each in members)
                bound = LOAD_FACTOR * total / len(members)
            if member.outstanding_tokens <= bound:
                return member
        raise AssertionError("the least loaded has no more than the mean")


_POINTS = 160  # per member: shares differ by 1/sqrt(160), 8 % (one standard deviation)
_POINTS_A_HASH = 8  # points of 8 bytes


class HashRing(Generic[T]):
    """Consistent hashing (Karger et al. 1997): a key belongs to the next point on a ring.

    Each member has many points, so that adding or removing one moves about 1/n of the keys, evenly
    from or to all the others. The text that places each member makes the ring the same in every
    process.
    """

    def __init__(self, members: Iterable[tuple[str, T]]) -> None:
        owners = {point: member for place, member in members for point in _points(place)}
        self._points = sorted(owners)
        self._members = [owners[point] for point in self._points]

    def walk(self, key: bytes) -> Iterator[T]:
        """Yields each member once, in the order in which `key` would belong to them."""
        count = len(self._points)
        start = bisect_right(self._points, _hash(key)) if count else 0
        seen: set[T] = set()
        for index in range(start, start + count):
            member = self._members[index % count]
            if member not in seen:
                seen.add(member)
                yield member


def _hash(key: bytes) -> int:
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little")


def _points(place: str) -> Iterator[int]:
    for index in range(_POINTS // _POINTS_A_HASH):
        yield from unpack("<8Q", blake2b(f"{place}\0{index}".encode()).digest())


def _place(member: Member, members: Sequence[Member]) -> str:
    """Returns the text whose hash places a member on the ring.

    That is its address, so that all gateways agree, plus its name if two share an address.
    """
    address = member.backend.name
    alone = sum(each.backend.name == address for each in members) == 1
    return address if alone else f"{address}\0{member.name}"


def _load_difference(a: Member, b: Member) -> float:
    """Returns how much more loaded `a` is than `b`, by their reports; both must have reported."""
    pressures = _pressure(a), _pressure(b)
    if pressures[0] is not None and pressures[1] is not None:
        return pressures[0] - pressures[1]
    return float(_requests(a) - _requests(b))


def _pressure(member: Member) -> float | None:
    """Returns the used part of the KV cache plus the wait for a batch slot in service times.

    A server finishes `running` requests in one service time, so the last of `waiting` requests
    waits waiting / running service times (Little's law). A report is up to a second old. Requests
    begun and ended since then are added and subtracted; otherwise all requests of that second would
    go to the member that was least loaded at its beginning. They count towards the queue if there
    was one, otherwise towards the cache. None if the KV-cache usage is not reported.
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
    """Returns its number of requests, other clients' included, with the same correction."""
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
        return Affinity(lambda ask: ask.prefix)
    return Affinity(lambda ask: ask.session.encode(errors="surrogatepass"))


def ask_for(
    routing: Routing, tokens: int, data: dict[str, Any], headers: Mapping[bytes, bytes]
) -> Ask:
    """Returns what a pool with this `routing` needs to know of a request with the body `data`."""
    if routing.policy == "prefix":
        return Ask(tokens, prefix=_prefix(data, routing.prefix_chars))
    if routing.policy == "session":
        return Ask(tokens, session=_session(data, headers, routing.session_header))
    return Ask(tokens)


def _session(data: dict[str, Any], headers: Mapping[bytes, bytes], header: str) -> str:
    value = headers.get(header.lower().encode())
    if value is not None:
        return value.decode("latin-1")
    metadata = data.get("metadata")
    anthropic = metadata.get("user_id") if isinstance(metadata, dict) else None
    for value in (data.get("prompt_cache_key"), data.get("user"), anthropic):
        if isinstance(value, str):
            return value
    return ""


def _prefix(data: dict[str, Any], chars: int) -> bytes:
    """Returns the beginning of the (first) prompt; token ids are written as decimals."""
    prompt = data.get("prompt", data.get("input"))
    opening = [{"content": data.get(name)} for name in ("instructions", "system")]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):  # Responses
        return _joined(_texts([*opening, *prompt]), chars)
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return _joined((*_texts(opening), prompt), chars)
    if isinstance(prompt, list):
        return str(prompt[:chars]).encode()[:chars]
    messages = data.get("messages")
    return _joined(_texts([*opening, *messages]), chars) if isinstance(messages, list) else b""


def _texts(messages: list[Any]) -> Iterable[str]:
    """Yields the texts of messages piece by piece, uncopied: an image may have megabytes."""
    for message in messages:
        if not isinstance(message, dict):
            continue
        content = message.get("content")
        if isinstance(content, str | list):
            yield f"{message.get('role')}\n"
            yield from _leaves(content)
            yield "\n"


def _leaves(value: Any, depth: int = 8) -> Iterable[str]:
    """Yields the strings in `value`, and its other values as text, but no names of fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        if depth:
            for item in value.values() if isinstance(value, dict) else value:
                yield from _leaves(item, depth - 1)
    else:
        yield str(value)


def _joined(texts: Iterable[str], chars: int) -> bytes:
    found = ""
    for text in texts:
        found += text[: chars - len(found)]
        if len(found) >= chars:
            break
    return found.encode(errors="replace")
