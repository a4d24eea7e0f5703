"""Batches are the same every time, longest first."""

import pytest

from calibrate.samples.batches import chunk_ends, make_batches


def test_longest_first_padded_on_the_right() -> None:
    sequences = [[1], [2, 2, 2], [3, 3], [4, 4, 4], [5]]
    batches = make_batches(sequences, list("abcde"), batch_size=2, chunk=3)
    assert [batch.token_ids.tolist() for batch in batches] == [
        [[2, 2, 2], [4, 4, 4]],
        [[3, 3], [1, 0]],
        [[5]],
    ]
    assert [batch.lengths for batch in batches] == [(3, 3), (2, 1), (1,)]
    assert [batch.origins for batch in batches] == [("b", "d"), ("c", "a"), ("e",)]
    assert {batch.chunk for batch in batches} == {3}
    assert sum(batch.tokens for batch in batches) == 10


@pytest.mark.parametrize(
    ("count", "ends"),
    [
        (1, (1,)),
        (32, (32,)),
        (33, (33,)),
        (130, (32, 64, 130)),
        (100, (32, 64, 100)),
        (512, (32, 64, 128, 256, 512)),
        (1500, (32, 64, 128, 256, 512, 1024, 1500)),
    ],
)
def test_chunks_end_at_doublings(count: int, ends: tuple[int, ...]) -> None:
    assert chunk_ends(count) == ends
