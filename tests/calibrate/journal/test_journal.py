"""A run stopped at whatever moment continues to the same bytes, or says why it cannot."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from calibrate.journal.journal import discard
from calibrate.observe.sweep import Observed
from octet.errors import ArtifactError
from tests.calibrate.killed import HOWS
from tests.calibrate.runs import assert_same_counts, batches_of, interrupt_after, run
from tests.models import write_model

ROOT = Path(__file__).parents[3]
LAYERS = 3


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama") / "m", "llama", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def whole(llama: Path) -> Observed:
    return run(llama)


@pytest.fixture(autouse=True)
def every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations are kept of every layer, as if each took long."""
    monkeypatch.setattr("calibrate.journal.journal.KEEP_EVERY_S", 0.0)


def stopped(llama: Path, journal: Path, *, layers: float, **settings: Any) -> Path:
    """A journal of a run that was interrupted when it had done `layers`."""
    with pytest.raises(KeyboardInterrupt):
        run(llama, journal, advance=interrupt_after(layers / LAYERS), **settings)
    return journal


def test_killed_at_every_step_it_continues_to_the_same_bytes(llama: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.calibrate.killed", str(llama), str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800
    )
    assert result.returncode == 0, result.stderr[-2000:]
    told = [json.loads(line) for line in result.stdout.splitlines()]
    for how in HOWS:
        moments = [moment for moment in told if moment["how"] == how]
        assert all(moment["same"] for moment in moments), moments
        assert {moment["finished"] for moment in moments} >= set(range(LAYERS)), how
        assert len(moments) > 8, how
        assert list((tmp_path / how / "spill").glob("*")) == []


@pytest.mark.parametrize("spill", [False, True])
def test_finished_layers_are_not_computed_again(
    llama: Path, tmp_path: Path, whole: Observed, spill: bool
) -> None:
    settings = {"spill": tmp_path} if spill else {}
    journal = stopped(llama, tmp_path / "journal", layers=1.5, **settings)
    before = {x.name: x.stat().st_mtime_ns for x in journal.glob("layer-*")}
    assert sorted(before) == ["layer-000.json", "layer-000.safetensors"]
    told: list[int] = []
    resumed = run(llama, journal, advance=told.append, **settings)
    assert_same_counts(whole, resumed)
    assert told[0] == sum(batch.tokens for batch in batches_of(5)) // LAYERS
    assert before.items() <= {x.name: x.stat().st_mtime_ns for x in journal.glob("layer-*")}.items()


def test_a_mixture_of_experts_continues_to_the_same_counts(tmp_path: Path) -> None:
    moe = write_model(tmp_path / "moe", "mixtral", num_hidden_layers=LAYERS)
    journal = stopped(moe, tmp_path / "journal", layers=2.5)
    assert_same_counts(run(moe), run(moe, journal))


def test_one_set_of_activations_is_kept(llama: Path, tmp_path: Path) -> None:
    journal = stopped(llama, tmp_path / "journal", layers=2.5)
    assert [x.name for x in journal.glob("activations-*") if any(x.iterdir())] == [
        "activations-001"
    ]
    run(llama, journal)
    assert list(journal.glob("activations-*")) == []


@pytest.mark.parametrize("spill", [False, True])
def test_what_was_not_kept_is_computed_again_and_not_counted(
    llama: Path, tmp_path: Path, whole: Observed, spill: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("calibrate.journal.journal.KEEP_EVERY_S", 3600.0)
    journal = stopped(llama, tmp_path / "journal", layers=2.5)
    assert list(tmp_path.rglob("activations-*")) == []
    assert len(list(journal.glob("layer-*.json"))) == 2
    told: list[int] = []
    settings = {"spill": tmp_path / "spill"} if spill else {}
    assert_same_counts(whole, run(llama, journal, advance=told.append, **settings))
    tokens = sum(batch.tokens for batch in batches_of(5))
    assert sum(told) == tokens
    assert told[0] == tokens * 2 // LAYERS


def test_activations_may_move_to_another_directory(
    llama: Path, tmp_path: Path, whole: Observed
) -> None:
    journal = stopped(llama, tmp_path / "journal", layers=1.5, spill=tmp_path / "a")
    assert len(list((tmp_path / "a").glob("octet-*/activations-000/*.bin"))) == 5
    stopped(llama, journal, layers=2.5, spill=tmp_path / "b")
    assert list((tmp_path / "a").glob("octet-*/*")) == []
    assert len(list((tmp_path / "b").glob("octet-*/activations-001/*.bin"))) == 5
    assert_same_counts(whole, run(llama, journal))
    assert list(tmp_path.rglob("activations-*")) == []


def test_what_a_run_has_kept_is_discarded_wherever_it_is(llama: Path, tmp_path: Path) -> None:
    progress = tmp_path / "out.progress"
    stopped(llama, progress / "layers", layers=1.5, spill=tmp_path / "spill")
    (progress / "algorithm").mkdir()
    (place,) = (tmp_path / "spill").iterdir()
    assert place.name.startswith("octet-out.progress-")
    discard(progress)
    assert list((tmp_path / "spill").iterdir()) == []
    assert not progress.exists()
    discard(progress)  # nothing is there: nothing to do


def test_empty_bins_are_not_stored(llama: Path, tmp_path: Path) -> None:
    journal = stopped(llama, tmp_path / "journal", layers=1.5)
    assert (journal / "layer-000.safetensors").stat().st_size < 6 * 2 * 32768


def test_a_record_arrives_after_what_it_names_is_on_the_disk(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: set[str] = set()
    synced, replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        flushed.add(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        synced(descriptor)

    def replaced(source: Path, target: Path) -> None:
        assert source.name in flushed
        if target.name == "layer-001.json":
            assert {"layer-001.safetensors.partial", "journal"} <= flushed
        if target.name == "kept.json":
            assert {f"{batch:06d}.bin" for batch in range(5)} <= flushed
            assert any(name.startswith("activations-") for name in flushed)
            flushed.clear()
        replace(source, target)

    monkeypatch.setattr("os.fsync", fsync)
    monkeypatch.setattr("os.replace", replaced)
    stopped(llama, tmp_path / "journal", layers=2.5)


@pytest.mark.parametrize(
    "file",
    [
        "journal.json",
        "layer-000.json",
        "layer-000.safetensors",
        "kept.json",
        "activations-000/000003.bin",
    ],
)
@pytest.mark.parametrize("damage", ["altered", "cut"])
def test_what_was_tampered_with_is_refused_by_name(
    llama: Path, tmp_path: Path, whole: Observed, file: str, damage: str
) -> None:
    journal = stopped(llama, tmp_path / "journal", layers=1.5)
    content = bytearray((journal / file).read_bytes())
    if damage == "cut":
        del content[-3:]
    else:
        digit = 120 if file.endswith(".json") else len(content) // 2
        content[digit] ^= 1
    (journal / file).write_bytes(content)
    told = rf"{file}: altered since it was written \(SHA-256 differs\); --restart begins anew$"
    with pytest.raises(ArtifactError, match=told):
        run(llama, journal)
    assert_same_counts(whole, run(llama, journal, restart=True))


def test_activations_that_are_missing_are_named(llama: Path, tmp_path: Path) -> None:
    journal = stopped(llama, tmp_path / "journal", layers=1.5)
    (journal / "activations-000" / "000001.bin").unlink()
    with pytest.raises(ArtifactError, match=r"000001\.bin: No such file .* --restart"):
        run(llama, journal)


def test_counts_that_are_missing_or_cannot_be_read_are_named(llama: Path, tmp_path: Path) -> None:
    journal = stopped(llama, tmp_path / "journal", layers=1.5)
    path = journal / "layer-000.safetensors"
    path.unlink()
    with pytest.raises(ArtifactError, match=r"layer-000\.safetensors: altered .* --restart"):
        run(llama, journal)
    path.mkdir()
    with pytest.raises(ArtifactError, match=r"layer-000\.safetensors: Is a dir.* --restart"):
        run(llama, journal)


def test_the_journal_of_another_run_is_refused(
    llama: Path, tmp_path: Path, whole: Observed, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = stopped(llama, tmp_path / "journal", layers=1.5)
    other = write_model(tmp_path / "other", "llama", num_hidden_layers=LAYERS, seed=1)
    with pytest.raises(ArtifactError, match="another model; --restart discards it"):
        run(other, journal)
    with pytest.raises(ArtifactError, match="another selection or length of samples;"):
        run(llama, journal, count=4)
    with monkeypatch.context() as patch:
        patch.setattr("tests.calibrate.runs.DTYPE", "float32")
        with pytest.raises(ArtifactError, match="another compute dtype;"):
            run(llama, journal)
    with monkeypatch.context() as patch:
        patch.setattr("torch.get_num_threads", lambda: 7)
        with pytest.raises(ArtifactError, match="threads; OMP_NUM_THREADS=1 continues it;"):
            run(llama, journal)
    assert_same_counts(whole, run(llama, journal))


def test_force_discards_a_journal_that_cannot_be_continued_and_no_other(
    llama: Path, tmp_path: Path, whole: Observed
) -> None:
    journal = stopped(llama, tmp_path / "journal", layers=1.5)
    before = (journal / "layer-000.json").stat().st_mtime_ns
    assert_same_counts(whole, run(llama, journal, force=True))
    assert (journal / "layer-000.json").stat().st_mtime_ns == before  # it was continued
    other = write_model(tmp_path / "other", "llama", num_hidden_layers=LAYERS, seed=1)
    run(other, journal, force=True)
    with pytest.raises(ArtifactError, match="another model; --restart discards it, and so"):
        run(llama, journal)
    (journal / "journal.json").write_text("{}")
    assert_same_counts(whole, run(llama, journal, force=True))


def test_a_directory_that_is_no_journal_is_left_alone(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ArtifactError, match="is not a journal; choose another"):
        run(llama, tmp_path, restart=True)
    assert [x.name for x in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_restart_that_was_killed_is_gone_on_with(
    llama: Path, tmp_path: Path, whole: Observed, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, removals = tmp_path / "journal", 0
    while True:
        shutil.rmtree(journal, ignore_errors=True)
        stopped(llama, journal, layers=2.5)
        left = removals

        def unlink(path: Path, missing_ok: bool = False, original: Any = Path.unlink) -> None:
            nonlocal left
            if left == 0:
                raise KeyboardInterrupt
            left -= 1
            original(path, missing_ok=missing_ok)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", unlink)
            try:
                run(llama, journal, restart=True)
            except KeyboardInterrupt:
                pass
            else:
                break
        assert_same_counts(whole, run(llama, journal))
        removals += 1
    assert removals > 6


def test_two_processes_do_not_share_a_journal_unawares(llama: Path, tmp_path: Path) -> None:
    first = stopped(llama, tmp_path / "journal", layers=0.5)
    with (first / "lock").open("w") as held:
        import fcntl

        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ArtifactError, match="another process is calibrating"):
            run(llama, first)
    run(llama, first)


@pytest.mark.parametrize("what", ["activations", "histograms", "record"])
def test_a_full_disk_loses_nothing_that_was_finished(
    llama: Path, tmp_path: Path, whole: Observed, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = tmp_path / "journal"

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        original = Path.open

        def opened(path: Path, mode: str = "r", **kwargs: Any) -> Any:
            if mode == "wb" and kwargs and path.match("activations-001/000002.bin"):
                path.write_text("some")  # it fills up while this is written
                full()
            return original(path, mode, **kwargs)

        if what == "activations":
            patch.setattr(Path, "open", opened)
        elif what == "histograms":
            patch.setattr("calibrate.journal.journal.write_tensors", full)
        else:
            patch.setattr(Path, "write_text", full)
        told = r"^\S+: no space left on the disk; free some( or name .* --spill,)? and run the same"
        with pytest.raises(ArtifactError, match=told):
            run(llama, journal)
    assert list(journal.glob("*.partial")) == []
    assert_same_counts(whole, run(llama, journal))
    shutil.rmtree(journal)
