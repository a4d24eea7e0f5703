"""Consistent hashing (Karger et al. 1997): a key belongs to the next point on a ring.

Each member has many points, so that adding or removing one moves about 1/n of the keys, evenly from
or to all the others.
"""

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator
from hashlib import blake2b
from struct import unpack
from typing import Generic, TypeVar

__all__ = ["HashRing"]

T = TypeVar("T", bound=Hashable)
_POINTS = 160  # per member: shares differ by 1/sqrt(160), 8 % (one standard deviation)
_POINTS_A_HASH = 8  # points of 8 bytes


class HashRing(Generic[T]):
    """A ring built from members and the text that places each; the same in every process."""

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
