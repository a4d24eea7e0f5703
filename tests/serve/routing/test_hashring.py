"""Consistent hashing: even shares, and little moves when a member comes or goes."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.routing.policies import HashRing

KEYS = [str(number).encode() for number in range(4000)]


def ring(names: list[str]) -> HashRing[str]:
    return HashRing((name, name) for name in names)


def owners(it: HashRing[str]) -> list[str]:
    return [next(it.walk(key)) for key in KEYS]


def names(count: int) -> list[str]:
    return [f"vllm http://10.0.0.{number}:8000" for number in range(count)]


@pytest.mark.parametrize("count", [2, 3, 8, 16])
def test_every_member_gets_its_share(count: int) -> None:
    shares = Counter(owners(ring(names(count))))
    fair = len(KEYS) / count
    assert len(shares) == count
    assert 0.7 * fair < min(shares.values()) and max(shares.values()) < 1.35 * fair


@pytest.mark.parametrize("count", [2, 4, 10])
def test_one_more_member_takes_its_share_and_moves_nothing_else(count: int) -> None:
    before, after = owners(ring(names(count))), owners(ring(names(count + 1)))
    moved = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert {new for _, new in moved} == {names(count + 1)[-1]}
    assert len(moved) == pytest.approx(len(KEYS) / (count + 1), rel=0.3)
    assert {old for old, _ in moved} == set(names(count))  # from all alike


def test_the_order_of_members_does_not_matter() -> None:
    assert owners(ring(names(5))) == owners(ring(names(5)[::-1]))


@settings(max_examples=50)
@given(
    st.sets(st.text(max_size=8), max_size=8),
    st.binary(max_size=40),
    st.data(),
)
def test_a_walk_meets_each_member_once_and_skips_who_left(
    members: set[str], key: bytes, data: st.DataObject
) -> None:
    walk = list(ring(sorted(members)).walk(key))
    assert sorted(walk) == sorted(members)
    if members:
        gone = data.draw(st.sampled_from(sorted(members)))
        rest = list(ring(sorted(members - {gone})).walk(key))
        assert rest == [member for member in walk if member != gone]
