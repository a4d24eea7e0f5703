"""Long samples follow the policy, and packing loses and repeats nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibrate.samples.plan import Limited, LongPolicy, Row, limit_rows, pack_rows
from octet.errors import SampleError

END = 0


def limited(long: LongPolicy) -> Limited:
    sequences = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11, 12, 13, 14]]
    return limit_rows(sequences, ["line 1", "line 2", "line 3"], 3, long)


def test_cut_keeps_the_beginning() -> None:
    result = limited("cut")
    assert [list(row.ids) for row in result.rows] == [[1, 2, 3], [4, 5, 6], [11, 12, 13]]
    assert (result.over_long, result.tokens_cut) == (2, 5)


def test_split_keeps_everything() -> None:
    result = limited("split")
    assert [list(row.ids) for row in result.rows] == [
        [1, 2, 3],
        [4, 5, 6],
        [7, 8, 9],
        [10],
        [11, 12, 13],
        [14],
    ]
    assert [row.sample for row in result.rows] == [0, 1, 1, 1, 2, 2]
    assert result.rows[3].origin == "line 2, part 3"
    assert (result.over_long, result.tokens_cut) == (2, 0)


def test_refuse_names_the_first_and_counts_the_others() -> None:
    with pytest.raises(
        SampleError, match=r"line 2 is 7 tokens long, 3 are allowed \(as are 1 more"
    ):
        limited("refuse")


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=8), min_size=1, max_size=12),
    st.integers(8, 20),
)
def test_packing_loses_no_token(sequences: list[list[int]], max_length: int) -> None:
    rows = [Row(ids, f"line {n}", n) for n, ids in enumerate(sequences)]
    packed = pack_rows(rows, max_length, END)
    assert all(len(row.ids) <= max_length for row in packed)
    found: dict[str, list[int]] = {}
    for row in packed:
        rest = list(row.ids)
        members = row.origin.split(" + ")
        for place, origin in enumerate(members):
            ids = sequences[int(origin.removeprefix("line "))]
            assert rest[: len(ids)] == ids
            found[origin] = rest[: len(ids)]
            rest = rest[len(ids) :]
            if place + 1 < len(members) and ids[-1] != END:
                assert rest.pop(0) == END
        assert rest == []
    assert len(found) == len(sequences)


def test_rows_are_filled_longest_first_by_length_and_order_alone() -> None:
    lengths = [3, 5, 2, 5, 1]
    rows = [Row([n + 1] * size, str(n), n) for n, size in enumerate(lengths)]
    assert [row.origin for row in pack_rows(rows, 8, END)] == ["1 + 2", "3 + 4", "0"]
    assert list(pack_rows(rows, 8, END)[0].ids) == [2, 2, 2, 2, 2, END, 3, 3]
