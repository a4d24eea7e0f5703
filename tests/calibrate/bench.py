"""A checkpoint, observed, with what the tests of simulation, sensitivity and budget need of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from calibrate.decoder.loading import ComputeDtype, load_model
from calibrate.observe.histogram import Histogram, Histograms
from calibrate.observe.sweep import observe_checkpoint
from calibrate.quality.divergence import Reference
from calibrate.samples.batches import Batch, make_batches
from calibrate.scales.derive import Quantization, derive_scales
from octet.model.checkpoint import Checkpoint
from octet.recipe import Recipe


@dataclass
class Bench:
    model: Any
    checkpoint: Checkpoint
    batches: list[Batch]
    histograms: dict[str, Histogram]
    reference: Reference

    def quantization(self, recipe: Recipe) -> Quantization:
        return derive_scales(self.checkpoint, recipe, self.histograms)

    def scales(self, recipe: Recipe) -> dict[str, NDArray[np.float32]]:
        return self.quantization(recipe).scales


def make_bench(path: Path, *, samples: int = 12, length: int = 48) -> Bench:
    """The model in float32 and random tokens, samples of unequal length in batches of 4."""
    checkpoint = Checkpoint.open(path)
    model = load_model(checkpoint, "float32")
    generator = torch.Generator().manual_seed(1)
    vocabulary = checkpoint.spec.vocab_size
    lengths = torch.randint(length // 2, length + 1, (samples,), generator=generator).tolist()
    rows = [torch.randint(vocabulary, (size,), generator=generator).tolist() for size in lengths]
    batches = make_batches(rows, [f"row {i}" for i in range(samples)], batch_size=4)
    histograms = histograms_of(checkpoint, batches, "float32")
    reference = Reference(model, checkpoint.spec, batches)
    return Bench(model, checkpoint, batches, histograms, reference)


def histograms_of(
    checkpoint: Checkpoint, batches: Sequence[Batch], dtype: ComputeDtype
) -> dict[str, Histogram]:
    observed = observe_checkpoint(checkpoint, batches, dtype=dtype)
    return dict(Histograms(observed.histograms, observed.observations))


def recipe_with(name: str, **changes: Any) -> Recipe:
    """A preset with some fields changed."""
    return Recipe.model_validate(Recipe.load(name).model_dump() | changes)


@torch.inference_mode()
def sample_logits(model: Any, batches: list[Batch]) -> list[torch.Tensor]:
    """float64 [T, V] of each sample, every one run by itself, without padding."""
    return [
        model(ids[None, :length], use_cache=False).logits[0].double()
        for batch in batches
        for ids, length in zip(batch.token_ids, batch.lengths, strict=True)
    ]
