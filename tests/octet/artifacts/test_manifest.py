"""Artifacts appear whole or not at all, and a reader notices every change."""

import errno
import hashlib
import json
import os
from pathlib import Path

import pytest

from octet.artifacts.manifest import Kind, Manifest, check_destination, software, write_artifact
from octet.artifacts.provenance import ModelIdentity
from octet.errors import ArtifactError
from octet.model.checkpoint import Checkpoint
from octet.recipe import Recipe
from octet.storage import files
from octet.storage.files import XXH3


@pytest.fixture(scope="module")
def manifest(tiny_model: Path) -> Manifest:
    return Manifest(
        kind="calibration",
        model=ModelIdentity.of(Checkpoint.open(tiny_model)),
        recipe=Recipe.load("fp8"),
        software=software("numpy", "no-such-package"),
    )


def write(path: Path, manifest: Manifest, text: str = "one", *, force: bool = False) -> Manifest:
    with write_artifact(path, force=force, kind="calibration") as writer:
        (writer.path / "sub").mkdir()
        (writer.path / "sub" / "data.txt").write_text(text)
        return writer.finish(manifest)


def test_round_trip(tmp_path: Path, manifest: Manifest) -> None:
    written = write(tmp_path / "a", manifest)
    read = Manifest.load(tmp_path / "a", "calibration")
    assert read == written and list(read.files) == ["sub/data.txt"]
    assert "no-such-package" not in read.software and "numpy" in read.software
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_identity_is_of_the_content(tmp_path: Path, manifest: Manifest) -> None:
    first = write(tmp_path / "a", manifest)
    assert write(tmp_path / "b", manifest).identity == first.identity
    assert write(tmp_path / "c", manifest, "two").identity != first.identity


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_a_failure_leaves_nothing(
    tmp_path: Path, manifest: Manifest, error: type[BaseException]
) -> None:
    write(tmp_path / "a", manifest)
    for name in ("a", "b"):
        with (
            pytest.raises(error),
            write_artifact(tmp_path / name, force=True, kind="calibration") as writer,
        ):
            (writer.path / "half").write_text("half")
            raise error
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert Manifest.load(tmp_path / "a").files.keys() == {"sub/data.txt"}


def test_replacing_needs_force_and_an_artifact(tmp_path: Path, manifest: Manifest) -> None:
    write(tmp_path / "a", manifest)
    with pytest.raises(ArtifactError, match="exists already; add --force"):
        write(tmp_path / "a", manifest, "two")
    write(tmp_path / "a", manifest, "two", force=True)
    assert (tmp_path / "a" / "sub" / "data.txt").read_text() == "two"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(ArtifactError, match="is not an Octet artifact"):
        write(tmp_path / "mine", manifest, force=True)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"


def test_an_altered_or_missing_file_is_named(tmp_path: Path, manifest: Manifest) -> None:
    write(tmp_path / "a", manifest)
    (tmp_path / "a" / "sub" / "data.txt").write_text("ona")
    with pytest.raises(ArtifactError, match=r"sub/data.txt: altered"):
        Manifest.load(tmp_path / "a")
    (tmp_path / "a" / "sub" / "data.txt").unlink()
    with pytest.raises(ArtifactError, match=r"sub/data.txt: missing"):
        Manifest.load(tmp_path / "a")


@pytest.mark.parametrize(
    ("kind", "wrote"),
    [
        (None, "octet calibrate, octet export or octet build-engine"),
        ("calibration", "octet calibrate"),
    ],
)
def test_what_is_no_artifact_is_refused_with_the_command_that_writes_one(
    tmp_path: Path, kind: Kind | None, wrote: str
) -> None:
    (tmp_path / "a.jsonl").touch()
    for path, what in (
        (tmp_path / "none", "no such directory"),
        (tmp_path / "a.jsonl", "not a directory"),
        (tmp_path, r"not an Octet artifact \(no manifest.json\)"),
    ):
        with pytest.raises(ArtifactError, match=rf"^{path}: {what}; give what {wrote} wrote$"):
            Manifest.load(path, kind)


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with (
        pytest.raises(
            ArtifactError, match=rf"^{out}: no space left on the disk; free some and run"
        ),
        write_artifact(out) as writer,
    ):
        (writer.path / "half").write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert list(tmp_path.iterdir()) == []


def test_another_version_kind_or_key_is_refused(tmp_path: Path, manifest: Manifest) -> None:
    write(tmp_path / "a", manifest)
    with pytest.raises(ArtifactError, match="is a calibration, not an ONNX export"):
        Manifest.load(tmp_path / "a", "onnx")
    path = tmp_path / "a" / "manifest.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"schema_version": 2}))
    newer = r"manifest.json: schema version 2, written by a newer Octet; this one reads up to 1"
    with pytest.raises(ArtifactError, match=rf"{newer}: pip install -U octet-llm$"):
        Manifest.load(tmp_path / "a")
    path.write_text(json.dumps(data | {"schema_version": 0}))
    with pytest.raises(ArtifactError, match=r"schema version 0; this release reads 1: use the"):
        Manifest.load(tmp_path / "a")
    path.write_text(json.dumps(data | {"colour": "red"}))
    with pytest.raises(ArtifactError, match="colour"):
        Manifest.load(tmp_path / "a")
    path.write_text(json.dumps(data | {"details": {"kv_cache": "float16"}}))
    again = "copy it again from where it was made, or make it again"
    said = rf"manifest.json: altered since it was written .*; {again} with octet calibrate$"
    with pytest.raises(ArtifactError, match=said):
        Manifest.load(tmp_path / "a")
    path.write_text("{")
    with pytest.raises(ArtifactError, match=rf"not valid JSON: .*; {again}$"):
        Manifest.load(tmp_path / "a")
    for absent in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ArtifactError, match=r"; give what octet calibrate, .* wrote$"):
            Manifest.load(absent)


def test_a_missing_file_is_named_with_what_writes_it_again(
    tmp_path: Path, manifest: Manifest
) -> None:
    written = write(tmp_path / "a", manifest.model_copy(update={"kind": "engine"}))
    (tmp_path / "a" / next(iter(written.files))).unlink()
    with pytest.raises(ArtifactError, match=r"missing; .*, or make it again with octet build-en"):
        Manifest.load(tmp_path / "a")


def test_a_destination_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, manifest: Manifest
) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArtifactError, match="no directory that can be written to"):
        check_destination(tmp_path / "file" / "out", force=False)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ArtifactError, match="is a symbolic link"):
        check_destination(tmp_path / "link", force=False)
    write(tmp_path / "a", manifest)
    with pytest.raises(ArtifactError, match="which is read; choose another"):
        check_destination(
            tmp_path / "a", force=True, kind="calibration", inputs=[tmp_path / "a" / "sub"]
        )
    check_destination(tmp_path / "a", force=True, kind="calibration", inputs=[tmp_path / "b"])


def test_a_changed_checkpoint_is_noticed(
    tmp_path: Path, tiny_model: Path, manifest: Manifest
) -> None:
    import shutil

    copy = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    manifest.model.require(Checkpoint.open(copy))
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"model.safetensors has changed since calibration"):
        manifest.model.require(Checkpoint.open(copy))


def test_a_calibration_is_replaced_by_a_calibration_alone(
    tmp_path: Path, manifest: Manifest
) -> None:
    write(tmp_path / "a", manifest)
    with pytest.raises(ArtifactError, match="is a calibration, which --force keeps"):
        check_destination(tmp_path / "a", force=True, kind="checkpoint")
    check_destination(tmp_path / "a", force=True, kind="calibration")


@pytest.mark.parametrize("recorded", [True, False])
def test_a_file_is_known_by_each_hash_that_was_recorded(
    tiny_model: Path, manifest: Manifest, recorded: bool
) -> None:
    model = manifest.model if recorded else manifest.model.model_copy(update={"checksums": {}})
    weights = tiny_model / "model.safetensors"
    digest = model.digest(weights.name)
    digest.update(weights.read_bytes())
    assert digest.hexdigest().startswith(XXH3) == recorded
    model.require_file(weights, digest.hexdigest())
    digest.update(b"more")
    for wrong in (digest.hexdigest(), XXH3 + "0" * 32, "0" * 64, None):
        with pytest.raises(ArtifactError, match=r"model\.safetensors (has changed|is missing)"):
            model.require_file(weights, wrong)


def test_a_manifest_of_before_checksums_is_read(tmp_path: Path, manifest: Manifest) -> None:
    written = write(tmp_path / "a", manifest)
    path = tmp_path / "a" / "manifest.json"
    data = json.loads(path.read_text())
    del data["model"]["checksums"], data["identity"]
    data["identity"] = hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(data))
    read = Manifest.load(tmp_path / "a")
    assert read.model.checksums == {} and read.model.files == written.model.files
    assert read.identity == data["identity"]


def test_a_manifest_that_may_not_be_read_is_not_called_altered(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "out", manifest)

    def denied(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files, "open_file", denied)  # root may read anything
    with pytest.raises(ArtifactError, match=r"/manifest.json: Permission denied$"):
        Manifest.load(tmp_path / "out", "calibration")
