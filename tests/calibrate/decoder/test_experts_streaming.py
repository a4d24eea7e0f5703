"""Experts observed layer by layer: the histograms of the whole model, and of a plain gather."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from calibrate.decoder.loading import ComputeDtype, load_model
from calibrate.observe.counting_cpu import count_reference
from calibrate.observe.sweep import observe_checkpoint
from calibrate.samples.batches import Batch
from octet.errors import NumericsError
from octet.model.checkpoint import Checkpoint
from octet.model.spec import ModelSpec
from octet.storage.tensors import Tensor, write_tensors
from tests.calibrate.runs import assert_counts_of_the_whole
from tests.models import write_model

# A dense layer, then a sparse one; and every layer sparse, under other names.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {"decoder_sparse_step": 2, "num_hidden_layers": 4}),
    "mixtral": ("mixtral", {}),
}


@pytest.fixture(scope="module", params=MODELS)
def moe(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    kind, settings = MODELS[request.param]
    return Checkpoint.open(write_model(tmp_path_factory.mktemp("moe") / kind, kind, **settings))


@pytest.fixture(scope="module")
def batches(sequences: Sequence[list[int]]) -> list[Batch]:
    """Four batches in two chunks, padded."""
    made = []
    for index in range(4):
        rows = sequences[3 * index : 3 * index + 3]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        origins = tuple(f"line {3 * index + row + 1}" for row in range(3))
        made.append(Batch(ids, tuple(map(len, rows)), origins, chunk=index // 2))
    assert any(min(batch.lengths) < max(batch.lengths) for batch in made)
    return made


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layer_by_layer_as_in_the_whole_model(
    moe: Checkpoint, batches: list[Batch], dtype: ComputeDtype
) -> None:
    streamed = observe_checkpoint(moe, batches, dtype=dtype, threads=1)
    assert_counts_of_the_whole(streamed, load_model(moe, dtype), moe.spec, batches, threads=1)


def gathered(model: Any, spec: ModelSpec, batches: Sequence[Batch]) -> dict[str, np.ndarray]:
    """Counts of what each expert's gate projection reads, from the inputs of the stock block."""
    counts = {
        f"{spec.experts_of(spec.layer(layer))}.{expert}.{spec.expert_projections[0]}.input": 0
        for layer in spec.sparse_layers
        for expert in range(spec.experts)
    }
    found: dict[str, Any] = dict(counts)
    for batch in batches:
        real = torch.arange(batch.token_ids.shape[1]) < torch.tensor(batch.lengths)[:, None]

        def gather(layer: int, inputs: tuple[torch.Tensor, ...], real: torch.Tensor) -> None:
            hidden, chosen, _ = inputs
            for expert in range(spec.experts):
                sent = (chosen == expert).any(-1) & real.flatten()
                name = f"{spec.experts_of(spec.layer(layer))}.{expert}"
                projection = spec.expert_projections[0]
                found[f"{name}.{projection}.input"] += count_reference(hidden[sent])

        hooks = [
            model.model.layers[layer].mlp.experts.register_forward_pre_hook(
                lambda _, inputs, layer=layer, real=real, gather=gather: gather(layer, inputs, real)
            )
            for layer in spec.sparse_layers
        ]
        with torch.inference_mode():
            model.model(batch.token_ids, use_cache=False)
        for hook in hooks:
            hook.remove()
    return found


def test_an_expert_is_observed_on_the_tokens_sent_to_it(
    moe: Checkpoint, batches: list[Batch]
) -> None:
    streamed = observe_checkpoint(moe, batches, dtype="float32", threads=1)
    model = load_model(moe, "float32")
    model.set_experts_implementation("eager")
    expected = gathered(model, moe.spec, batches)
    tokens = 0
    for name, counts in expected.items():
        assert (streamed.histograms[name].sum(axis=0) == counts).all(), name
        tokens += int(np.sum(counts)) // moe.spec.hidden_size
    real = sum(batch.tokens for batch in batches)
    assert tokens == real * moe.spec.experts_per_token * len(moe.spec.sparse_layers)


def test_what_stands_at_padding_changes_nothing(moe: Checkpoint, batches: list[Batch]) -> None:
    def padded_with(token: int) -> list[Batch]:
        made = []
        for batch in batches:
            ids = batch.token_ids.clone()
            for row, length in zip(ids, batch.lengths, strict=True):
                row[length:] = token
            made.append(replace(batch, token_ids=ids))
        return made

    first, second = (
        observe_checkpoint(moe, padded_with(token), dtype="float32", threads=1).histograms
        for token in (0, 4095)
    )
    for name in first:
        differ = int(np.abs(first[name] - second[name]).sum())
        # Padding lengthens an expert's matrix products, whose last bits may then round elsewhere.
        assert differ <= 2e-3 * first[name].sum(), name


def test_a_broken_expert_is_named_with_channel_and_sample(
    moe: Checkpoint, batches: list[Batch], tmp_path: Path
) -> None:
    spec = moe.spec
    expert = f"{spec.experts_of(spec.layer(spec.sparse_layers[-1]))}.1"
    gate, _, down = spec.expert_projections
    tensors = {name: moe.read(name) for name in moe.tensor_names}
    weight = tensors[f"{expert}.{gate}.weight"]
    codes = weight.codes.copy()
    codes[7] = 0x7FC0  # NaN in BF16: the 8th channel that the down projection reads
    tensors[f"{expert}.{gate}.weight"] = Tensor(weight.dtype, codes)
    shutil.copy(moe.path / "config.json", tmp_path)
    write_tensors(tmp_path / "model.safetensors", tensors)
    message = rf"{expert}.{down}.input holds \d+ NaN and 0 Inf .* channel 7 in the sample of line"
    with pytest.raises(NumericsError, match=message):
        observe_checkpoint(Checkpoint.open(tmp_path), batches, dtype="float32", threads=1)


def test_a_run_that_was_stopped_continues_to_the_same_counts(
    moe: Checkpoint, batches: list[Batch], tmp_path: Path
) -> None:
    whole = observe_checkpoint(moe, batches, dtype="float32", threads=1)
    total, told = sum(batch.tokens for batch in batches), 0

    def stop_in_the_last_layer(tokens: int) -> None:
        nonlocal told
        told += tokens
        if told > total * (moe.spec.layers - 0.5) / moe.spec.layers:
            raise KeyboardInterrupt

    journal = tmp_path / "journal"
    with pytest.raises(KeyboardInterrupt):
        observe_checkpoint(
            moe,
            batches,
            dtype="float32",
            threads=1,
            journal=journal,
            advance=stop_in_the_last_layer,
        )
    resumed = observe_checkpoint(moe, batches, dtype="float32", threads=1, journal=journal)
    assert list(resumed.histograms) == list(whole.histograms)
    for name, counts in whole.histograms.items():
        assert (resumed.histograms[name] == counts).all(), name
