"""The compiled counter equals numpy's bincount, bin for bin."""

import numpy as np
import pytest
import torch

from calibrate.observe.counting_cpu import CpuCounter, make_counter
from octet.artifacts.calibration import BINS
from tests.calibrate.contents import contents, count_reference

SIZES = [1, 2, 3, 4, 5, 127, 2047, 2048, 2049, 65_537, 200_003]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def count(x: torch.Tensor, lengths: list[int] | None, threads: int) -> np.ndarray:
    counter = CpuCounter(2, threads)
    try:
        counter.add(1, x, lengths)
        bad, (other, counts) = counter.bad()(), counter.counts()
    finally:
        counter.close()
    first_special = 0x7C00 if x.dtype == torch.float16 else 0x7F80
    assert bad == ([1] if counts[first_special:].any() else [])
    assert not other.any()
    return counts


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_the_reference_bin_for_bin(dtype: torch.dtype, threads: int) -> None:
    for size in SIZES:
        for name, x in contents(size, dtype).items():
            counts = count(x.reshape(1, 1, size), [1], threads)
            reference = count_reference(x)
            assert counts.sum() == size, (name, size)
            assert (counts == reference).all(), (name, size)


def test_rounds_float32_to_nearest_even_at_every_middle() -> None:
    codes = torch.arange(0x7F80, dtype=torch.int32) << 16
    middles = (codes[:, None] + torch.tensor([0, 0x7FFF, 0x8000, 0x8001, 0xFFFF])).view(
        torch.float32
    )
    counts = count(middles.reshape(1, 1, -1), [1], 1)
    expected = torch.bincount(
        middles.flatten().to(torch.bfloat16).view(torch.int16).long(), minlength=BINS
    )
    assert (counts == expected.numpy()).all()


def test_reads_only_the_rows_within_each_length() -> None:
    x = torch.randn(4, 7, 3, 5)
    lengths = [7, 0, 3, 1]
    for row, length in enumerate(lengths):
        x[row, length:] = float("nan")  # would be seen if it were read
    kept = torch.cat([x[row, :length].flatten() for row, length in enumerate(lengths)])
    assert (count(x, lengths, 2) == count_reference(kept)).all()


def test_splits_runs_between_threads_without_loss() -> None:
    x = torch.randn(3, 700, 129).to(torch.bfloat16)
    lengths = [700, 1, 350]
    kept = torch.cat([x[row, :length].flatten() for row, length in enumerate(lengths)])
    for threads in (1, 2, 3, 8):
        assert (count(x, lengths, threads) == count_reference(kept)).all(), threads


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_takes_tensors_that_are_not_contiguous(dtype: torch.dtype) -> None:
    x = torch.randn(2, 8, 30, 64).to(dtype)  # [B, H, T, D]
    assert (count(x.transpose(1, 2), [30, 30], 1) == count_reference(x)).all()
    assert (count(x[..., ::2], [8, 8], 1) == count_reference(x[..., ::2])).all()


def test_counts_flat_rows_whole() -> None:
    x = torch.randn(37, 64).to(torch.bfloat16)
    assert (count(x, None, 2) == count_reference(x)).all()
    assert count(x[:0], None, 2).sum() == 0


def test_adds_to_what_is_there_until_cleared() -> None:
    counter = make_counter(torch.device("cpu"), 1)
    x = torch.randn(1, 10, 10)
    for _ in range(3):
        counter.add(0, x, [10])
    counts = counter.counts()
    assert (counts[0] == 3 * count_reference(x)).all()
    counter.add(0, torch.full((1, 1, 1), float("nan")), [1])
    assert counter.bad()() == [0]
    counter.clear()
    assert counter.bad()() == []
    assert counter.counts().sum() == 0
    assert counts.sum() == 300  # what was handed out is the caller's
    counter.close()


def test_refuses_other_dtypes() -> None:
    with pytest.raises(TypeError, match="float64"):
        count(torch.zeros(1, 1, 1, dtype=torch.float64), [1], 1)
