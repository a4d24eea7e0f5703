"""Records packed in one row answer what each answers by itself, and cost no more than they must."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from calibrate.decoder.layers import LayeredModel
from calibrate.decoder.loading import ComputeDtype
from calibrate.golden import golden_set
from calibrate.samples.batches import golden_batches
from calibrate.simulate import packed as module
from calibrate.simulate.packed import Pack, packs
from octet.artifacts.golden import GoldenSet
from octet.errors import UnsupportedError
from octet.model.checkpoint import Checkpoint
from tests.models import GPT_OSS, KNOWN, write_model

LENGTHS = (1, 3, 4, 9, 20, 30, 44, 130, 150)  # some longer than a block of queries
CPU = torch.device("cpu")


@pytest.fixture(
    scope="module", params=["llama", "mistral-window", "qwen2-window", "mixtral", "gpt_oss"]
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    kind, settings = (KNOWN | GPT_OSS)[request.param]
    return Checkpoint.open(write_model(tmp_path_factory.mktemp("model"), kind, **settings))


@pytest.fixture(scope="module")
def golden(checkpoint: Checkpoint) -> GoldenSet:
    return golden_of(checkpoint)


def golden_of(checkpoint: Checkpoint) -> GoldenSet:
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(1, 4096, (n,), generator=generator).tolist() for n in LENGTHS]
    return golden_set(checkpoint, [("", ids) for ids in prompts])


def made(golden: GoldenSet, most: int = 160, together: int = 300) -> list[Pack]:
    return packs(golden_batches(golden, range(len(LENGTHS)), most), golden, together, CPU)


def finished(model: LayeredModel, found: Sequence[Pack]) -> dict[tuple[int, int], torch.Tensor]:
    """The last hidden state [H] of each record at each position."""
    states = [pack.embed(model, None) for pack in found]
    last = model.spec.layers - 1
    for index, layer in model.sweep():
        run = [pack.finish if index == last else pack.forward for pack in found]
        states = [step(model, layer, x) for step, x in zip(run, states, strict=True)]
    return {
        (int(record), int(at)): x
        for pack, rows in zip(found, states, strict=True)
        for record, at, x in zip(pack.records, pack.at, rows[0], strict=True)
    }


def test_records_in_a_row_answer_as_each_by_itself(
    checkpoint: Checkpoint, golden: GoldenSet
) -> None:
    model = LayeredModel(checkpoint, "float32")
    packed = made(golden)
    assert 1 < len(packed) < len(LENGTHS)
    assert_as_each_by_itself(model, golden, packed)


@pytest.mark.parametrize("kind", ["gemma2", "qwen2_moe"])
def test_so_do_batches_with_their_padding(kind: str, tmp_path: Path) -> None:
    """Of a model whose attention nobody knows, in no more passes than there are batches."""
    checkpoint = Checkpoint.open(write_model(tmp_path, kind))
    golden = golden_of(checkpoint)
    batches = golden_batches(golden, range(len(LENGTHS)), 160)
    packed = packs(batches, golden, 300, CPU, padded=True)
    assert len(packed) == len(batches) < len(LENGTHS)
    assert_as_each_by_itself(LayeredModel(checkpoint, "float32"), golden, packed)


def assert_as_each_by_itself(
    model: LayeredModel, golden: GoldenSet, packed: Sequence[Pack]
) -> None:
    found = finished(model, packed)
    assert list(found) == [
        (record, at)
        for pack in packed
        for record in dict.fromkeys(pack.records.tolist())
        for at in range(len(golden.records[record].tops))
    ]
    for number, record in enumerate(golden.records):
        count = len(record.tops)
        ids = [*record.prompt_token_ids, *record.continuation_token_ids[: count - 1]]
        hidden = model.embed(torch.tensor([ids]))
        for _ in model.sweep():
            hidden = model.forward(hidden, None)
        ours = torch.stack([found[number, at] for at in range(count)])
        torch.testing.assert_close(ours, hidden[0, -count:], atol=1e-4, rtol=1e-4)


def test_linears_meet_real_tokens_alone_and_the_last_mlp_what_is_compared(
    checkpoint: Checkpoint, golden: GoldenSet
) -> None:
    """Which is what a prediction costs."""
    model = LayeredModel(checkpoint, "float32")
    (pack,) = made(golden, together=10_000)
    states = pack.embed(model, None)
    compared = sum(len(record.tops) for record in golden.records)
    assert (pack.tokens, len(pack.at)) == (sum(LENGTHS) + compared - len(LENGTHS), compared)
    seen: list[tuple[int, ...]] = []
    for index, layer in model.sweep():
        step = pack.finish if index == checkpoint.spec.layers - 1 else pack.forward
        hook = layer.mlp.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[:2]))
        states = step(model, layer, states)
        hook.remove()
    assert seen == [(1, pack.tokens), (1, compared)]


def test_a_record_alone_needs_no_attention_of_its_own(
    checkpoint: Checkpoint, golden: GoldenSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where transformers lets none be put in its place: records in one row are refused there."""
    model = LayeredModel(checkpoint, "float32")
    expected = finished(model, made(golden, 0, 0))
    monkeypatch.setattr(module, "replace_attention", lambda *_: nullcontext())
    for key, rows in finished(model, made(golden, 0, 0)).items():
        torch.testing.assert_close(rows, expected[key], atol=1e-4, rtol=1e-4)
    said = r"does not let the attention of \w+ be replaced, so .* or give --no-predict"
    with pytest.raises(UnsupportedError, match=said):
        finished(model, made(golden))


def test_noise_is_of_the_last_bit_and_the_same_again(tiny_model: Path) -> None:
    checkpoint = Checkpoint.open(tiny_model)
    golden = golden_set(checkpoint, [("", [5] * n) for n in (3, 7)])
    (pack,) = packs(golden_batches(golden, (0, 1), 100), golden, 100, CPU)
    units: dict[ComputeDtype, float] = {"float32": 2.0**-23, "bfloat16": 2.0**-7}
    for dtype, unit in units.items():
        model = LayeredModel(checkpoint, dtype)
        plain = pack.embed(model, None)
        drawn = [pack.embed(model, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
        assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
        off = (drawn[0].double() / plain.double() - 1).abs()
        assert 0 < off.max() <= 2 * unit
