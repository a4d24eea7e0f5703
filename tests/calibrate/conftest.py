"""A checkpoint loaded once, its batches, and one calibration of it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from calibrate.decoder.loading import load_model
from calibrate.options import Options
from calibrate.pipeline import run
from calibrate.samples.batches import Batch, make_batches, tokenize
from calibrate.samples.source import load_samples
from calibrate.samples.tokens import load_tokenizer
from octet.artifacts.calibration import Calibration
from octet.model.checkpoint import Checkpoint
from octet.recipe import Recipe
from tests.calibrate.prompts import choose_once
from tests.shared import Shared


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """The tiny model's operations are too small to share."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="package", autouse=True)
def prompts_chosen_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        choose_once(patch)
        yield


@pytest.fixture(scope="session")
def checkpoint(tiny_model: Path) -> Checkpoint:
    return Checkpoint.open(tiny_model)


@pytest.fixture(scope="session")
def model(checkpoint: Checkpoint) -> Any:
    """The tiny model in float32; tests leave it as it was."""
    return load_model(checkpoint, "float32")


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Checkpoint) -> Any:
    return load_tokenizer(checkpoint)


@pytest.fixture(scope="session")
def sequences(tokenizer: Any, tiny_samples: Path) -> list[list[int]]:
    """Token ids of 12 samples of unequal length."""
    samples = load_samples(tiny_samples).samples[:12]
    return tokenize(samples, tokenizer, max_length=512, vocab_size=4096)


@pytest.fixture(scope="session")
def batch(sequences: list[list[int]]) -> Batch:
    return make_batches(sequences, ["line 1"] * len(sequences), batch_size=12)[0]


@pytest.fixture(scope="package")
def calibration(
    one_thread: None, tiny_model: Path, tiny_samples: Path, shared: Shared
) -> Calibration:
    """`fp8-static` in float32 on 128 samples; two are left to be held out."""

    def build(path: Path) -> None:
        recipe = Recipe.load("fp8-static")
        run(
            Options(
                model=tiny_model,
                samples=tiny_samples,
                out=path,
                recipe=recipe,
                count=128,
                dtype="float32",
            )
        )

    return Calibration.load(shared.directory("tiny-fp8-static", build))
