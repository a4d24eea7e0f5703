"""Small runs of calibration, the same in every process that a test starts, and their batches."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from calibrate.decoder.loading import ComputeDtype
from calibrate.observe.observer import observe
from calibrate.observe.sweep import Observed, observe_checkpoint
from calibrate.samples.batches import Batch, make_batches, tokenize
from calibrate.samples.source import load_samples
from octet.model.checkpoint import Checkpoint
from octet.model.spec import ModelSpec
from octet.storage.tensors import Tensor, write_tensors

__all__ = [
    "DTYPE",
    "assert_counts_of_the_whole",
    "assert_same_counts",
    "batches_from",
    "batches_of",
    "run",
    "save_counts",
]

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


def batches_from(samples: Path, count: int, tokenizer: Any) -> list[Batch]:
    """The first `count` samples of a file, 8 a batch, cut at 512 tokens."""
    found = load_samples(samples).samples[:count]
    rows = tokenize(found, tokenizer, max_length=512, vocab_size=4096)
    return make_batches(rows, [sample.origin for sample in found], batch_size=8)


def run(model: Path, journal: Path | None = None, *, count: int = 5, **settings: Any) -> Observed:
    """The histograms of `batches_of(count)` with one thread."""
    torch.set_num_threads(1)
    return observe_checkpoint(
        Checkpoint.open(model),
        batches_of(count),
        dtype=DTYPE,
        threads=1,
        journal=journal,
        **settings,
    )


def save_counts(path: Path, observed: Observed) -> None:
    write_tensors(path, {name: Tensor.of(x) for name, x in observed.histograms.items()})


def assert_counts_of_the_whole(
    streamed: Observed, model: Any, spec: ModelSpec, batches: Sequence[Batch], **settings: Any
) -> None:
    """Layer by layer, `batches` in two chunks gave what the whole model gives, bin for bin."""
    for chunk in range(2):
        with observe(model, spec, **settings) as observer:
            for batch in batches:
                if batch.chunk == chunk:
                    observer.run(batch)
        assert list(observer.histograms) == list(streamed.histograms)
        for name, histogram in observer.histograms.items():
            assert (streamed.histograms[name][chunk] == histogram.counts).all(), name
        assert streamed.observations == observer.observations


def assert_same_counts(one: Observed, other: Observed) -> None:
    assert list(one.histograms) == list(other.histograms)
    for name, counts in one.histograms.items():
        np.testing.assert_array_equal(counts, other.histograms[name], err_msg=name)
