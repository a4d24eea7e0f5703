"""On a GPU too, layer by layer is the whole model: the same counts, bin for bin."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from calibrate.decoder.arithmetic import Float32Linear
from calibrate.decoder.loading import ComputeDtype, load_model
from calibrate.observe.sweep import Observed, observe_checkpoint
from octet.errors import NumericsError
from octet.model.checkpoint import Checkpoint
from tests.calibrate.runs import (
    assert_counts_of_plain_hooks,
    assert_same_counts,
    batches_of,
    with_code,
)
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
    for module in model.modules():  # layer by layer, BF16 weights are multiplied as they are
        if isinstance(module, Float32Linear):
            module.weight.data = module.weight.data.bfloat16()
    assert_counts_of_plain_hooks(streamed, model, checkpoint.spec, batches)


def test_a_nan_is_named_with_channel_and_sample(tmp_path: Path) -> None:
    llama, weight = write_model(tmp_path / "llama", "llama"), "model.layers.1.mlp.up_proj.weight"
    broken = with_code(llama, tmp_path / "broken", weight, (5, 0), 0x7FC0)
    told = r"^model\.layers\.1\.mlp\.down_proj\.input holds .* channel 5 in the sample of line 1:"
    with pytest.raises(NumericsError, match=told):
        observe_checkpoint(broken, batches_of(2), dtype="bfloat16", device="cuda")


def test_a_journal_continues_with_the_same_counts(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_model(tmp_path / "llama", "llama", num_hidden_layers=4))
    batches, journal = batches_of(5), tmp_path / "journal"
    whole = observe_checkpoint(checkpoint, batches, dtype="bfloat16", device="cuda")

    def stop(_tokens: int) -> None:
        if (journal / "layer-001.json").exists():
            raise KeyboardInterrupt

    def again(advance: Callable[[int], None]) -> Observed:
        settings = {"device": "cuda", "journal": journal, "advance": advance}
        return observe_checkpoint(checkpoint, batches, dtype="bfloat16", **settings)

    with pytest.raises(KeyboardInterrupt):
        again(stop)
    kept = sorted(path.name for path in journal.glob("layer-*.json"))
    assert kept == ["layer-000.json", "layer-001.json"]
    assert_same_counts(whole, again(lambda tokens: None))
