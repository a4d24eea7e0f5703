"""On a GPU too, layer by layer is the whole model: the same counts, bin for bin."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from calibrate.decoder.loading import ComputeDtype, load_model
from calibrate.observe.sweep import Observed, observe_checkpoint
from octet.model.checkpoint import Checkpoint
from tests.calibrate.runs import assert_counts_of_the_whole, batches_of
from tests.models import write_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="needs an NVIDIA GPU; there:"
        " pytest -m gpu tests/calibrate/observe/test_sweep_cuda.py",
    ),
]


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_counts_are_those_of_the_whole_model(
    tmp_path: Path, kind: str, dtype: ComputeDtype
) -> None:
    checkpoint = Checkpoint.open(write_model(tmp_path / kind, kind, num_hidden_layers=4))
    batches = batches_of(5)
    told: list[int] = []
    streamed = observe_checkpoint(
        checkpoint, batches, dtype=dtype, device="cuda", advance=told.append
    )
    assert sum(told) == sum(batch.tokens for batch in batches)
    assert streamed.facts["device"] == torch.cuda.get_device_name()
    model = load_model(checkpoint, dtype).cuda()
    assert_counts_of_the_whole(streamed, model, checkpoint.spec, batches)


def test_a_journal_continues_with_the_same_counts(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_model(tmp_path / "llama", "llama", num_hidden_layers=4))
    batches, journal = batches_of(5), tmp_path / "journal"
    whole = observe_checkpoint(checkpoint, batches, dtype="bfloat16", device="cuda")

    class Stopped(Exception):
        pass

    def stop(_tokens: int) -> None:
        if (journal / "layer-001.json").exists():
            raise Stopped

    def again(advance: Callable[[int], None]) -> Observed:
        return observe_checkpoint(
            checkpoint,
            batches,
            dtype="bfloat16",
            device="cuda",
            journal=journal,
            advance=advance,
        )

    with pytest.raises(Stopped):
        again(stop)
    kept = sorted(path.name for path in journal.glob("layer-*.json"))
    assert kept == ["layer-000.json", "layer-001.json"]
    continued = again(lambda tokens: None)
    for name, counts in whole.histograms.items():
        assert (continued.histograms[name] == counts).all(), name
