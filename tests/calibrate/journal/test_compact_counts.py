"""Counts come out of a small memory exactly as they went in."""

import numpy as np
import pytest

from calibrate.journal.compact_counts import CompactCounts
from octet.artifacts.calibration import BINS


def normal(scale: float, elements: int, seed: int) -> np.ndarray:
    """The counts of normal float32 values rounded down to bfloat16's codes."""
    x = np.random.default_rng(seed).normal(0, scale, elements).astype(np.float32)
    return np.bincount(x.view(np.uint32) >> 16 & 0x7FFF, minlength=BINS)


CASES = {
    "empty": np.zeros(BINS, np.int64),
    "full": np.arange(BINS, dtype=np.int64),
    "the ends": np.eye(1, BINS, 0, np.int64)[0] + np.eye(1, BINS, BINS - 1, np.int64)[0],
    "large": np.where(np.arange(BINS) % 7, 0, 10**12),
    "at the edges of integers": np.array(
        [0, 255, 256, 65535, 65536, 2**32 - 1, 2**32] + [0] * 32761
    ),
    "chunks": np.stack([normal(1e-3, 999, 0), np.zeros(BINS, np.int64), normal(100, 77, 1)]),
}


@pytest.mark.parametrize("case", CASES)
def test_what_comes_out_is_what_went_in(case: str) -> None:
    counts = CASES[case]
    kept = CompactCounts()
    kept["a"] = counts
    out = kept["a"]
    assert out.dtype == np.int64 and out.shape == counts.shape and (out == counts).all()
    out += 1  # a copy: what is kept is not what was handed out
    assert (kept["a"] == counts).all()


def test_it_is_a_dictionary() -> None:
    kept = CompactCounts()
    kept.update({"b": CASES["full"], "a": CASES["empty"]})
    kept["b"] = CASES["large"]
    assert list(kept) == ["b", "a"] and len(kept) == 2 and "c" not in kept
    assert (kept["b"] == CASES["large"]).all()
    del kept["b"]
    with pytest.raises(KeyError, match="b"):
        kept["b"]


def test_an_activation_takes_a_small_part_of_its_array() -> None:
    counts = np.stack([normal(1.0, 200_000, seed) for seed in range(5)])
    kept = CompactCounts()
    kept["a"] = counts
    assert kept.nbytes * 20 < counts.nbytes
