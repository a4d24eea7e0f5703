"""Layer by layer: one layer's memory, a journal, spilled activations, and what ends a run."""

import shutil
from pathlib import Path

import pytest

from calibrate.decoder.layers import LayeredModel
from calibrate.observe.sweep import observe_checkpoint
from octet.errors import ArtifactError, NumericsError
from octet.model.checkpoint import Checkpoint
from octet.storage.tensors import Tensor, write_tensors
from tests.calibrate.runs import assert_same_counts, batches_of, run, with_code
from tests.models import rewrite_model, write_model

NAN, INF = 0x7FC0, 0x7F80  # in bfloat16


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, a head of its own, grouped queries."""
    return write_model(tmp_path_factory.mktemp("llama") / "llama", "llama", num_hidden_layers=4)


def test_a_journal_changes_no_counts_and_activations_go_where_they_are_told(
    llama: Path, tmp_path: Path
) -> None:
    expected, spill = run(llama), tmp_path / "spill"
    assert_same_counts(expected, run(llama, tmp_path / "a"))
    assert_same_counts(expected, run(llama, spill=spill))
    assert list(spill.iterdir()) == []
    seen: set[str] = set()

    def advance(tokens: int) -> None:
        seen.update(path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*.bin"))

    assert_same_counts(expected, run(llama, tmp_path / "b", spill=spill, advance=advance))
    assert seen == {"spill"}
    assert list(spill.iterdir()) == []


def test_changed_weights_are_those_that_run(llama: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(llama)
    name = "model.layers.2.mlp.up_proj.weight"
    other = {name: Tensor("BF16", checkpoint.read(name).codes[::-1].copy())}
    write_tensors(tmp_path / "weights.safetensors", other)
    changed = checkpoint.with_changes(tmp_path / "weights.safetensors")
    streamed = observe_checkpoint(changed, batches_of(2), dtype="float32")
    rewritten = Checkpoint.open(rewrite_model(llama, tmp_path / "model", lambda t: t | other))
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


MOE = "layers.1.block_sparse_moe.experts.1"


@pytest.mark.parametrize(
    ("kind", "weight", "code", "tensor"),
    [
        ("llama", "layers.2.mlp.up_proj", NAN, "layers.2.mlp.down_proj.input"),
        ("llama", "layers.3.self_attn.v_proj", INF, "layers.3.self_attn.value"),
        ("llama", "layers.0.self_attn.k_proj", INF, "layers.0.self_attn.key"),
        ("mixtral", f"{MOE}.w1", NAN, f"{MOE}.w2.input"),
    ],
)
def test_nan_and_inf_are_named_with_channel_and_sample(
    llama: Path, tmp_path: Path, kind: str, weight: str, code: int, tensor: str
) -> None:
    model = llama if kind == "llama" else write_model(tmp_path / kind, kind)
    broken = with_code(model, tmp_path / "model", f"model.{weight}.weight", (5, 0), code)
    held = r"[1-9]\d* NaN and 0 Inf" if code == NAN else r"\d+ NaN and [1-9]\d* Inf"
    told = rf"^model.{tensor} holds {held} among \d+ values of .* channel 5 in the sample of line"
    with pytest.raises(NumericsError, match=told):
        observe_checkpoint(broken, batches_of(3), dtype="float32", journal=tmp_path / "journal")
    layer = int(weight.split(".")[1])
    kept = sorted(x.name for x in (tmp_path / "journal").glob("layer-*.json"))
    assert kept == [f"layer-{index:03d}.json" for index in range(layer)]


def test_the_sample_named_is_the_first_that_is_broken(llama: Path, tmp_path: Path) -> None:
    batches = batches_of(3)
    batches[1].token_ids[2, 1] = 4095
    assert not any((batch.token_ids == 4095).any() for batch in (batches[0], batches[2]))
    broken = with_code(llama, tmp_path / "model", "model.embed_tokens.weight", (4095, 3), NAN)
    with pytest.raises(NumericsError, match=r"layers.0.self_attn.q_proj.input .* of line 6:"):
        observe_checkpoint(broken, batches, dtype="float32")


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
        assert sum(told) == 0


def test_a_place_to_spill_that_cannot_be_made_is_named(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for journal in (None, tmp_path / "journal"):
        with pytest.raises(ArtifactError, match=rf"^{tmp_path}/file\S*: (Not a dir|File exists)"):
            run(llama, journal, spill=tmp_path / "file" / "spill")
