"""Layer by layer is the whole model: the same counts, bin for bin, in a layer's memory."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from calibrate.decoder.layers import LayeredModel
from calibrate.decoder.loading import ComputeDtype, load_model, to_torch
from calibrate.observe.sweep import observe_checkpoint
from octet.errors import ArtifactError, CheckpointError, NumericsError
from octet.model.checkpoint import Checkpoint
from octet.storage.tensors import Tensor, write_tensors
from tests.calibrate.runs import assert_counts_of_the_whole, assert_same_counts, batches_of, run
from tests.models import write_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, a head of its own, grouped queries."""
    return write_model(tmp_path_factory.mktemp("llama") / "llama", "llama", num_hidden_layers=4)


def altered(model: Path, path: Path, name: str, codes: Any) -> Checkpoint:
    """A copy in `path` whose BF16 tensor `name` has `codes`; None leaves it out."""
    checkpoint = Checkpoint.open(model)
    tensors = {each: checkpoint.read(each) for each in checkpoint.tensor_names}
    del tensors[name]
    if codes is not None:
        tensors[name] = Tensor("BF16", codes)
    path.mkdir(exist_ok=True)
    shutil.copy(model / "config.json", path)
    write_tensors(path / "model.safetensors", tensors)
    return Checkpoint.open(path)


@pytest.mark.parametrize("queries", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_counts_are_those_of_the_whole_model(
    llama: Path, dtype: ComputeDtype, queries: bool
) -> None:
    checkpoint, batches = Checkpoint.open(llama), batches_of(5)
    streamed = observe_checkpoint(checkpoint, batches, dtype=dtype, queries=queries)
    model = load_model(checkpoint, dtype)
    assert_counts_of_the_whole(streamed, model, checkpoint.spec, batches, queries=queries)


def test_spilled_activations_give_the_same_counts(llama: Path, tmp_path: Path) -> None:
    assert_same_counts(run(llama), run(llama, spill=tmp_path / "spill"))
    assert list((tmp_path / "spill").iterdir()) == []


def test_a_journal_changes_no_counts_and_activations_go_where_they_are_told(
    llama: Path, tmp_path: Path
) -> None:
    expected, spill = run(llama), tmp_path / "spill"
    assert_same_counts(expected, run(llama, tmp_path / "a"))
    seen: set[str] = set()

    def advance(tokens: int) -> None:
        seen.update(path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*.bin"))

    assert_same_counts(expected, run(llama, tmp_path / "b", spill=spill, advance=advance))
    assert seen == {"spill"}
    assert list(spill.iterdir()) == []


def test_changed_weights_are_those_that_run(llama: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(llama)
    name = "model.layers.2.mlp.up_proj.weight"
    codes = checkpoint.read(name).codes[::-1].copy()
    write_tensors(tmp_path / "weights.safetensors", {name: Tensor("BF16", codes)})
    changed = checkpoint.with_changes(tmp_path / "weights.safetensors")
    streamed = observe_checkpoint(changed, batches_of(2), dtype="float32")
    rewritten = altered(llama, tmp_path / "model", name, codes)
    assert_same_counts(streamed, observe_checkpoint(rewritten, batches_of(2), dtype="float32"))


def test_progress_adds_up_to_the_tokens(llama: Path, tmp_path: Path) -> None:
    tokens = sum(batch.tokens for batch in batches_of(5))
    for _ in range(2):  # the second time everything is in the journal
        told: list[int] = []
        run(llama, tmp_path / "journal", advance=told.append)
        assert sum(told) == tokens


def test_no_layer_keeps_its_weights(llama: Path) -> None:
    model = LayeredModel(Checkpoint.open(llama), "float32")
    for index, layer in model.sweep():
        held = [
            number
            for number, other in enumerate(model._layers)
            if any(x.device.type != "meta" for x in other.parameters())
        ]
        assert held == [index]
        assert layer is model._layers[index]
    assert all(x.device.type == "meta" for x in layer.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_read_as_transformers_casts_them(dtype: torch.dtype) -> None:
    values = torch.randn(50, 30).to(torch.bfloat16)
    tensor = Tensor("BF16", values.view(torch.int16).numpy().view(np.uint16))
    assert torch.equal(to_torch(tensor, dtype), values.to(dtype))


@pytest.mark.parametrize(
    ("weight", "row", "code", "told"),
    [
        ("layers.2.mlp.up_proj", 5, 0x7FC0, r"layers.2.mlp.down_proj.input holds \d+ NaN and 0"),
        ("layers.3.self_attn.v_proj", 5, 0x7F80, r"layers.3.self_attn.value holds .* Inf"),
    ],
)
def test_nan_and_inf_are_named_with_channel_and_sample(
    llama: Path, tmp_path: Path, weight: str, row: int, code: int, told: str
) -> None:
    name = f"model.{weight}.weight"
    codes = Checkpoint.open(llama).read(name).codes.copy()
    codes[row] = code
    broken = altered(llama, tmp_path / "model", name, codes)
    with pytest.raises(NumericsError, match=rf"^model.{told}.* channel 5 in the sample of line 1:"):
        observe_checkpoint(broken, batches_of(3), dtype="float32", journal=tmp_path / "journal")
    layer = int(weight.split(".")[1])
    kept = sorted(x.name for x in (tmp_path / "journal").glob("layer-*.json"))
    assert kept == [f"layer-{index:03d}.json" for index in range(layer)]


def test_the_sample_named_is_the_first_that_is_broken(llama: Path, tmp_path: Path) -> None:
    batches = batches_of(3)
    batches[1].token_ids[2, 1] = 4095
    name = "model.embed_tokens.weight"
    codes = Checkpoint.open(llama).read(name).codes.copy()
    codes[4095, 3] = 0x7FC0
    assert not any((batch.token_ids == 4095).any() for batch in (batches[0], batches[2]))
    broken = altered(llama, tmp_path / "model", name, codes)
    with pytest.raises(NumericsError, match=r"layers.0.self_attn.q_proj.input .* of line 6:"):
        observe_checkpoint(broken, batches, dtype="float32")


def test_a_missing_tensor_is_named(llama: Path, tmp_path: Path) -> None:
    name = "model.layers.1.post_attention_layernorm.weight"
    with pytest.raises(CheckpointError, match=f"tensor {name} is missing"):
        altered(llama, tmp_path / "model", name, None)


def test_too_small_a_disk_is_refused_before_the_work(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 1))
    journal, spill = tmp_path / "journal", tmp_path / "spill"
    for place, full in (
        ({"journal": journal}, journal),
        ({"spill": spill}, spill),
        ({"journal": tmp_path / "b", "spill": spill}, spill),
    ):
        told: list[int] = []
        needs = (
            rf"^{full}\S*: keeping|one set.* needs \d+\.\d GB, the disk has 0\.0 GB free;.*--spill"
        )
        with pytest.raises(ArtifactError, match=needs):
            run(llama, advance=told.append, **place)
        assert told == []


def test_a_place_to_spill_that_cannot_be_made_is_named(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for journal in (None, tmp_path / "journal"):
        with pytest.raises(ArtifactError, match=rf"^{tmp_path}/file\S*: (Not a dir|File exists)"):
            run(llama, journal, spill=tmp_path / "file" / "spill")


def test_facts_say_what_the_sums_depend_on(llama: Path) -> None:
    facts = run(llama).facts
    assert facts["torch_threads"] == 1
    assert facts["device"].startswith("cpu (")
    assert (facts["processes"], facts["batches"]) == (1, 5)


def test_a_shard_that_is_missing_is_named(llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    index = '{"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}'
    (tmp_path / "model" / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"shard model-00001-of-00002.safetensors .* missing"):
        run(tmp_path / "model")
