"""Consistent hashing (Karger et al. 1997): a key belongs to the next point on a ring.

Each member has many points, so that one that comes or goes moves about 1/n of the keys, to or from
all the others evenly.
"""

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator
from hashlib import blake2b
from struct import unpack
from typing import Generic, TypeVar

__all__ = ["HashRing"]

T = TypeVar("T", bound=Hashable)
_POINTS = 160  # of each member: shares differ by 1/sqrt(160), 8 % (one standard deviation)
_POINTS_A_HASH = 8  # of 8 bytes


class HashRing(Generic[T]):
    """Built of members and the text that places each; the same in every process."""

    def __init__(self, members: Iterable[tuple[str, T]]) -> None:
        owners = {point: member for place, member in members for point in _points(place)}
        self._points = sorted(owners)
        self._members = [owners[point] for point in self._points]

    def walk(self, key: bytes) -> Iterator[T]:
        """Each member once, in the order in which `key` would belong to them."""
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
