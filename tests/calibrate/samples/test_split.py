"""Tests which samples are used, which are held out, and the warnings about them."""

import json
from pathlib import Path

import pytest

from calibrate.samples.inputs import split_samples
from calibrate.samples.source import load_samples
from octet.errors import SampleError


def texts(path: Path, *values: str) -> Path:
    path.write_text("\n".join(json.dumps({"text": value}) for value in values))
    return path


def test_golden_prompts_come_from_what_is_not_calibrated(tmp_path: Path) -> None:
    file = load_samples(texts(tmp_path / "s.jsonl", *(f"text {i}" for i in range(140))))
    split = split_samples(file, None, 130)
    assert [sample.text for sample in split.calibration] == [f"text {i}" for i in range(130)]
    assert [sample.text for sample in split.held_out] == [f"text {i}" for i in range(130, 140)]
    assert split.facts["also_calibrated"] == 0
    assert (split.sha256, split.kind) == (file.sha256, "JSONL")
    assert not split.warnings

    other = load_samples(texts(tmp_path / "h.jsonl", "text 5", "new"))
    split = split_samples(file, other, 130)
    assert split.facts["also_calibrated"] == 1
    assert split.facts["sha256"] == other.sha256
    assert "1 held-out samples are also calibration samples" in split.warnings


def test_nothing_held_out_is_said_loudly(tmp_path: Path) -> None:
    file = load_samples(texts(tmp_path / "s.jsonl", *(f"text {i}" for i in range(130)), " "))
    split = split_samples(file, None, 256)
    assert split.held_out == split.calibration
    assert split.facts["also_calibrated"] == 130
    assert any("no sample is held out" in warning for warning in split.warnings)
    assert any("1 samples without text" in warning for warning in split.warnings)


def test_what_follows_the_samples_needed_is_not_read(tmp_path: Path) -> None:
    path = texts(tmp_path / "s.jsonl", *(f"text {i}" for i in range(130 + 256)))
    path.write_text(path.read_text() + "\nbroken")
    assert len(split_samples(load_samples(path), None, 130).held_out) == 256
    with pytest.raises(SampleError, match="line 387: not JSON"):
        split_samples(load_samples(path), None, 131)
