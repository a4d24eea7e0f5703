"""The checkpoint that a server loaded, where it can be read, against the artifact."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octet.artifacts.manifest import ArtifactWriter, Manifest
from octet.proof.reference import load_proofs
from octet.storage.tensors import Tensor, write_tensors
from serve.proof import served_files
from serve.proof.engine_report import EngineReport, structural_findings
from tests.serve.proof.test_engine_report import declared

Change = Callable[[dict[str, Tensor]], Any]
KEY, VALUE = "model.layers.0.self_attn.k_scale", "model.layers.1.self_attn.v_scale"
WEIGHT = "model.layers.0.mlp.up_proj.weight_scale"


def sealed(directory: Path, **changed: Any) -> None:
    """Writes the manifest anew, over the files as they are."""
    manifest = Manifest.load(directory, verify=False)
    (directory / "manifest.json").unlink()
    ArtifactWriter(directory).finish(manifest.model_copy(update=changed))


def checkpoint(directory: Path, proofs: Path, change: Change = lambda tensors: None) -> Path:
    """An export with scales; `change` alters its tensors after it was written."""
    shutil.copytree(proofs, directory)
    scales = {KEY: 0.9, VALUE: 1.0, WEIGHT: 0.25}
    tensors = {n: Tensor.of(np.full(1, x, np.float32)) for n, x in scales.items()}
    write_tensors(directory / "model.safetensors", tensors)
    sealed(directory)
    altered = dict(tensors)
    change(altered)
    if altered != tensors:
        write_tensors(directory / "model.safetensors", altered)
    return directory


def findings(
    root: Path, directory: Path, *, local: bool = True, started: float | None = None
) -> list[str]:
    report = EngineReport("vllm", None, None, "fp8_e5m2", started, str(root), local=local)
    return structural_findings(report, load_proofs(directory), declared(), directory)


def drop_key(tensors: dict[str, Tensor]) -> None:
    del tensors[KEY]  # 0.9: no token changes


def halve_weight(tensors: dict[str, Tensor]) -> None:
    tensors[WEIGHT] = Tensor.of(np.full(1, 0.125, np.float32))


def drop_all(tensors: dict[str, Tensor]) -> None:
    tensors.clear()
    tensors["model.norm.weight"] = Tensor.of(np.ones(4, np.float32))


ALTERED = "model.safetensors of the checkpoint that it loaded is not as it was exported (SHA-256)"
LOADED = "the checkpoint that it loaded"


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        (lambda tensors: None, []),
        (drop_key, [ALTERED, f"{LOADED} lacks 1 k_scale tensor ({KEY})"]),
        (halve_weight, [ALTERED, f"{LOADED} has other values of 1 weight_scale tensor ({WEIGHT})"]),
        (drop_all, [ALTERED, f"{LOADED} has no scales: its weights are not quantized"]),
    ],
    ids=["as exported", "key scale dropped", "weight scale halved", "no scales"],
)
def test_scales_that_are_lost_are_found_without_a_number(
    change: Change, lines: list[str], proofs: Path, tmp_path: Path
) -> None:
    right = checkpoint(tmp_path / "right", proofs)
    served = checkpoint(tmp_path / "served", proofs, change)
    assert findings(served, right) == lines
    assert findings(served, served)[:1] == lines[:1]  # its own hashes tell


@pytest.mark.parametrize("change", [drop_key, lambda tensors: None], ids=["altered", "another"])
def test_what_was_written_after_the_server_began_is_not_what_it_loaded(
    change: Change, proofs: Path, tmp_path: Path
) -> None:
    """A new export takes the place of the one that is served, until the server is restarted."""
    right = checkpoint(tmp_path / "right", proofs)
    served = checkpoint(tmp_path / "served", proofs, change)
    if change is not drop_key:
        sealed(served, software={"by": "another"})
    written = max(path.stat().st_mtime for path in served.iterdir())
    assert findings(served, right, started=written - 60) == []
    assert findings(served, right, started=written - 0.9) != []  # as Linux may round it
    assert findings(served, right, started=written + 1) != []


def test_an_artifact_that_gave_way_to_another_has_no_scales_any_more(
    proofs: Path, tmp_path: Path
) -> None:
    """The gateway goes on with the golden records that it has read."""
    served = checkpoint(tmp_path / "served", proofs)
    ours = checkpoint(tmp_path / "ours", proofs)
    report = EngineReport("vllm", cache_dtype="fp8_e5m2", root=str(served), local=True)
    loaded = load_proofs(ours)
    assert structural_findings(report, loaded, declared(), ours) == []
    shutil.rmtree(ours)
    checkpoint(ours, proofs, halve_weight)
    sealed(ours)
    assert load_proofs(ours).identity != loaded.identity
    assert structural_findings(report, loaded, declared(), ours) == []
    shutil.rmtree(ours)
    shutil.copytree(served, ours)
    file = ours / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    assert structural_findings(report, loaded, declared(), ours) == []
    shutil.rmtree(ours)
    assert structural_findings(report, loaded, declared(), ours) == []


def test_another_artifact_is_found_and_a_sibling_is_none(proofs: Path, tmp_path: Path) -> None:
    right = checkpoint(tmp_path / "right", proofs)
    other = checkpoint(tmp_path / "other", proofs)
    for calibration, expected in ((None, "it loaded another artifact, "), ("c" * 64, "")):
        for directory in (right, other):
            sealed(directory, calibration=calibration, software={"by": directory.name})
        found = findings(other, right)
        assert len(found) == bool(expected) and all(expected in line for line in found)
        # A path of another machine says nothing of what lies there here.
        assert findings(other, right, local=False) == []


def test_a_calibration_knows_the_scales_of_the_cache(proofs: Path, tmp_path: Path) -> None:
    served = checkpoint(tmp_path / "served", proofs, drop_key)
    calibration = tmp_path / "calibration"
    shutil.copytree(proofs, calibration)
    scales = {f"{KEY}_e5m2": 0.9, f"{KEY}_e4m3": 0.02, f"{VALUE}_e5m2": 1.0}
    tensors = {n: Tensor.of(np.full((), x, np.float32)) for n, x in scales.items()}
    write_tensors(calibration / "scales.safetensors", tensors)
    sealed(calibration, kind="calibration")
    (served / "manifest.json").unlink()  # as a copy of the weights alone
    assert findings(served, calibration) == [f"{LOADED} lacks 1 k_scale tensor ({KEY})"]


def test_what_may_not_be_read_here_is_not_known(
    proofs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine runs as another user, in whose directories it keeps its checkpoint."""
    right = checkpoint(tmp_path / "right", proofs)
    assert findings(Path("/" + 300 * "x"), right) == []  # too long for a name here
    served = checkpoint(tmp_path / "served", proofs, drop_key)
    opened = served_files.open_file

    def denied(path: Path) -> Any:
        if path.parent == served and path.suffix == ".safetensors":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path)

    monkeypatch.setattr(served_files, "open_file", denied)
    assert findings(served, right) == []


def test_a_truncated_checkpoint_is_found_and_no_path_is_told(proofs: Path, tmp_path: Path) -> None:
    right = checkpoint(tmp_path / "right", proofs)
    served = checkpoint(tmp_path / "served", proofs)
    file = served / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    found = findings(served, right)
    assert found[0].startswith(f"{LOADED} cannot be read: its checkpoint/model.safetensors")
    assert not any(str(tmp_path) in line for line in found)
    file.unlink()
    assert findings(served, right) == []  # a directory without weights is some other path
