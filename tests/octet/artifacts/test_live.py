"""Live histograms: windows that a server writes and `read_live` reads back, or refuses by name."""

import errno
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import octet.artifacts.live as live
from octet.artifacts.calibration import Calibration
from octet.artifacts.live import Counting, LiveCounts, read_live
from octet.artifacts.manifest import Manifest
from octet.errors import ArtifactError, ConfigError
from octet.numerics.counting import BINS, count_codes
from octet.storage.tensors import Tensor, write_tensors


@pytest.fixture(scope="module")
def calibration(example_calibration: Path) -> Calibration:
    return Calibration.load(example_calibration)


def exported(origin: Calibration, **changes: Any) -> Manifest:
    """The manifest of an export of `origin`."""
    changes = {"kind": "onnx", "calibration": origin.manifest.identity} | changes
    return origin.manifest.model_copy(update=changes)


def write(
    directory: Path, manifest: Manifest, name: str, values: list[float], **given: Any
) -> LiveCounts:
    """Counts one step of `values` in observation `name`, and writes it as a window."""
    counts = LiveCounts(Counting(directory, 1, 1), manifest, **given)
    assert counts.begin_step()
    counts.add(name, count_codes(np.array(values, np.float32)))
    counts.end_step(len(values))
    counts.close()
    return counts


def first(calibration: Calibration) -> str:
    return next(iter(calibration.observations))


def test_ranks_of_an_engine_are_added_up(calibration: Calibration, tmp_path: Path) -> None:
    manifest = exported(calibration)
    for rank in (0, 1):
        write(tmp_path, manifest, first(calibration), [1.0, -1.0, 0.0], engine="ab", rank=rank)
    (window,) = read_live(tmp_path, calibration)
    assert window.tokens == 3
    counts = window.counts(first(calibration))
    assert counts.sum() == 6 and counts[0] == 2 and counts[0x3F80] == 4
    assert not window.counts("of no observation").any()


def test_a_start_removes_what_a_killed_writer_left(
    calibration: Calibration, tmp_path: Path
) -> None:
    left, being_written = (tmp_path / f".{name}-0-0.safetensors.partial" for name in "ab")
    for path in (left, being_written):
        path.write_bytes(b"half")
    os.utime(left, (0, 0))
    LiveCounts(Counting(tmp_path, 1), exported(calibration))
    assert list(tmp_path.iterdir()) == [being_written]


def test_ranks_draw_the_same_steps_and_about_one_in_n(
    calibration: Calibration, tmp_path: Path
) -> None:
    ranks = [
        LiveCounts(Counting(tmp_path, 10), exported(calibration), engine="ab", rank=rank)
        for rank in (0, 1)
    ]
    drawn = [[rank.begin_step() for _ in range(5000)] for rank in ranks]
    assert drawn[0] == drawn[1]
    assert 400 < sum(drawn[0]) < 600
    assert 200 < sum(drawn[0][::2]) < 300  # also of every second step


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_codes_are_counted_as_numbers_round(dtype: Any) -> None:
    values = np.array([[0.0, -0.0, 1.0], [-2.5, np.inf, 1e-7]], dtype)
    counts = count_codes(values)
    assert counts.shape == (BINS,) and counts.sum() == 6 and counts[0] == 2
    assert counts[0x7C00 if dtype == np.float16 else 0x7F80] == 1


def test_the_oldest_files_are_removed(
    calibration: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "KEPT", 3)
    for number in range(5):
        write(tmp_path, exported(calibration), first(calibration), [1.0] * (number + 1))
        newest = max(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        os.utime(newest, (number, number))
    assert sorted(w.tokens for w in read_live(tmp_path, calibration)) == [3, 4, 5]


def test_a_full_disk_loses_windows_and_nothing_else(
    calibration: Calibration,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(path: Path, *_: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(live, "write_tensors", full)
    with caplog.at_level(logging.WARNING):
        counts = write(tmp_path, exported(calibration), first(calibration), [1.0])
        counts.add(first(calibration), np.ones(BINS, np.int64))
        counts.end_step(1)
        counts.close()
    assert counts.failed == 2 and not list(tmp_path.iterdir())
    assert [r.getMessage() for r in caplog.records] == [
        f"{tmp_path}: live activations are not kept: No space left on device"
    ]


def test_a_file_that_is_being_written_is_not_read(calibration: Calibration, tmp_path: Path) -> None:
    write(tmp_path, exported(calibration), first(calibration), [1.0])
    (tmp_path / ".ab-0-1.safetensors.partial").write_bytes(b"half")
    assert len(read_live(tmp_path, calibration)) == 1


def test_an_export_of_no_calibration_is_refused(calibration: Calibration, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="names no calibration"):
        LiveCounts(Counting(tmp_path), exported(calibration, calibration=None))


def test_a_directory_that_cannot_be_written_is_refused(
    calibration: Calibration, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="give a directory that this user may write"):
        LiveCounts(Counting(tmp_path / "file" / "live"), exported(calibration))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"calibration": "0" * 64}, "another calibration of the same model and recipe"),
        ({"model": "other", "calibration": "0" * 64}, "of model other, recipe"),
    ],
)
def test_another_calibration_is_named(
    calibration: Calibration, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    if "model" in changes:
        changes["model"] = calibration.manifest.model.model_copy(update={"name": "other"})
    write(tmp_path, exported(calibration, **changes), first(calibration), [1.0])
    with pytest.raises(ArtifactError, match=words):
        read_live(tmp_path, calibration)


def test_windows_of_another_calibration_are_left_out(
    calibration: Calibration, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a rollout of another one, whose servers write to the same directory."""
    name = first(calibration)
    write(tmp_path, exported(calibration, calibration="0" * 64), name, [2.0, 3.0])
    write(tmp_path, exported(calibration), name, [1.0])
    (window,) = read_live(tmp_path, calibration)
    assert window.tokens == 1
    assert "1 of 2 files are of other calibrations, and left out" in caplog.text


def test_no_windows_are_named(calibration: Calibration, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no live histograms"):
        read_live(tmp_path, calibration)
    with pytest.raises(ConfigError, match="No such file"):
        read_live(tmp_path / "absent", calibration)


BAD = {
    "no metadata": (None, {}, "not live histograms"),
    "bins out of order": ("", {"bins": np.array([2, 1], np.uint16)}, "do not ascend"),
    "a bin too large": ("", {"bins": np.array([1, 40000], np.uint16)}, "do not ascend"),
    "another shape": ("", {"bins": np.array([1], np.uint16)}, "differ in shape"),
    "a float": ("", {"counts": np.ones(2, np.float32)}, "stored in a dtype"),
    "a sign": ("", {"counts": np.array([-1, 1])}, "stored in a dtype"),
    "too many": ("", {"counts": np.array([1, 1 << 60], np.uint64)}, "impossible"),
    "an unknown tensor": ("", {"name": "x"}, "has no such tensor"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_hostile_file_is_refused(calibration: Calibration, tmp_path: Path, case: str) -> None:
    metadata, changes, words = BAD[case]
    counts = write(tmp_path, exported(calibration), first(calibration), [1.0], engine="ab")
    assert counts.written == 1
    path = tmp_path / "ab-0-0.safetensors"
    given = {"bins": np.array([1, 2], np.uint16), "counts": np.array([1, 1], np.uint8)} | changes
    name = given.pop("name", first(calibration))
    text = live.TensorFile.open(path).metadata if metadata is not None else None
    write_tensors(path, {f"{name}.{k}": Tensor.of(v) for k, v in given.items()}, text)
    with pytest.raises(ArtifactError, match=words):
        read_live(tmp_path, calibration)


def test_a_truncated_file_is_refused(calibration: Calibration, tmp_path: Path) -> None:
    write(tmp_path, exported(calibration), first(calibration), [1.0], engine="ab")
    path = tmp_path / "ab-0-0.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ArtifactError, match="remove it"):
        read_live(tmp_path, calibration)
