"""Mean squares of linears' inputs are those of what the linears read, and cost no counts."""

from pathlib import Path

import numpy as np
import pytest
import torch

from calibrate.decoder.loading import load_model
from calibrate.observe.channel_squares import ChannelSquares
from calibrate.observe.histogram import Histogram
from calibrate.observe.sweep import observe_checkpoint
from octet.model.checkpoint import Checkpoint
from tests.calibrate.runs import batches_of
from tests.models import write_model

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(
                not torch.cuda.is_available(),
                reason="needs an NVIDIA GPU; there:"
                " pytest -m gpu tests/calibrate/observe/test_channel_squares.py",
            ),
        ],
    ),
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama") / "llama", "llama", num_hidden_layers=3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("lengths", [[700, 700, 700], [700, 1, 350]])
def test_sums_are_those_of_real_rows(dtype: torch.dtype, lengths: list[int], device: str) -> None:
    x = torch.randn(3, 700, 96, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    x[..., 5] *= 100
    given, squares = x.clone(), ChannelSquares()
    squares.add(7, x, lengths)
    squares.add(7, x[0], None)
    assert torch.equal(x, given)
    (slot,) = sums = squares.sums()
    rows = [*zip(x, lengths, strict=True), (x[0], 700)]
    expected = sum(row[:length].double().square().sum(0) for row, length in rows)
    assert slot == 7 and sums[7].tokens == sum(lengths) + 700
    np.testing.assert_allclose(sums[7].sums, expected.cpu().numpy(), rtol=1e-5)
    squares.clear()
    assert squares.sums() == {}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_every_input_has_the_energy_of_its_histogram(
    tmp_path: Path, kind: str, device: str
) -> None:
    """One batch: all of it is squared, and counted."""
    checkpoint = Checkpoint.open(write_model(tmp_path / kind, kind))
    observed = observe_checkpoint(checkpoint, batches_of(1), dtype="bfloat16", device=device)
    inputs = {linear.input: linear.in_features for linear in checkpoint.spec.linears()}
    reached = [name for name in inputs if observed.histograms[name].any()]
    assert list(observed.mean_squares) == reached
    assert kind == "llama" or len(reached) > len(inputs) // 2
    for name in reached:
        means = observed.mean_squares[name]
        assert means.shape == (inputs[name],) and means.dtype == np.float32
        values, counts = Histogram(observed.histograms[name].sum(axis=0), "bfloat16").finite()
        energy = (counts * values.astype(np.float64) ** 2).sum() / (counts.sum() / means.size)
        assert means.sum(dtype=np.float64) == pytest.approx(energy, rel=1e-5), name


def test_channels_are_those_of_the_whole_model(llama: Path) -> None:
    """Of every fourth batch: the first and the fifth of five."""
    checkpoint, batches = Checkpoint.open(llama), batches_of(5)
    observed = observe_checkpoint(checkpoint, batches, dtype="float32")
    model = load_model(checkpoint, "float32")
    name, rows = "model.layers.2.mlp.down_proj", []
    module = model.get_submodule(name)
    module.register_forward_pre_hook(lambda _, args: rows.append(args[0]))
    with torch.inference_mode():
        for batch in (batches[0], batches[4]):
            for ids, length in zip(batch.token_ids, batch.lengths, strict=True):
                model.base_model(input_ids=ids[None, :length], use_cache=False)
    expected = torch.cat([x[0] for x in rows]).double().square().mean(0).numpy()
    np.testing.assert_allclose(observed.mean_squares[f"{name}.input"], expected, rtol=1e-3)
