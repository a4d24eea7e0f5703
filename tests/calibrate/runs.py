"""One small run of calibration, the same in every process that a test starts."""

from pathlib import Path

import numpy as np
import torch

from calibrate.batches import Batch
from calibrate.loading import ComputeDtype
from calibrate.streaming import Observed, observe_checkpoint
from octet.checkpoint import Checkpoint
from octet.tensors import Tensor, write_tensors

__all__ = ["DTYPE", "assert_same_counts", "batches_of", "run", "save_counts"]

DTYPE: ComputeDtype = "bfloat16"


def batches_of(count: int, *, seed: int = 0) -> list[Batch]:
    """`count` padded batches of 3 rows in two chunks, from no file and no tokenizer."""
    rng = np.random.default_rng(seed)
    made = []
    for index in range(count):
        lengths = tuple(int(n) for n in rng.integers(5, 40, 3))
        ids = torch.from_numpy(rng.integers(1, 4096, (3, max(lengths))))
        origins = tuple(f"line {3 * index + row + 1}" for row in range(3))
        made.append(Batch(ids, lengths, origins, chunk=int(index >= count // 2)))
    return made


def run(
    model: Path, journal: Path | None = None, *, count: int = 5, **settings: object
) -> Observed:
    """The histograms of `batches_of(count)` with one thread."""
    torch.set_num_threads(1)
    return observe_checkpoint(
        Checkpoint.open(model),
        batches_of(count),
        dtype=DTYPE,
        threads=1,
        journal=journal,
        **settings,  # type: ignore[arg-type]
    )


def save_counts(path: Path, observed: Observed) -> None:
    write_tensors(path, {name: Tensor.of(x) for name, x in observed.histograms.items()})


def assert_same_counts(one: Observed, other: Observed) -> None:
    assert list(one.histograms) == list(other.histograms)
    for name, counts in one.histograms.items():
        np.testing.assert_array_equal(counts, other.histograms[name], err_msg=name)
