"""Samples are read, or refused in one line that names the place."""

import hashlib
import json
from pathlib import Path

import pytest

from calibrate.samples import MINIMUM, Sample, load_samples, require_enough
from calibrate.split import split_samples
from octet.errors import SampleError


def write(path: Path, *lines: str | bytes) -> Path:
    path.write_bytes(b"\n".join(x if isinstance(x, bytes) else x.encode() for x in lines))
    return path


def texts(path: Path, *values: str) -> Path:
    return write(path, *(json.dumps({"text": value}) for value in values))


def test_reads_texts_in_order_with_their_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "s.jsonl", '{"text": "a"}', "", '{"text": "é\\n", "n": 1}', "")
    file = load_samples(path)
    assert file.samples == (Sample("a", "line 1"), Sample("é\n", "line 3"))
    assert file.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_another_text_field(tmp_path: Path) -> None:
    path = write(tmp_path / "s.jsonl", '{"body": "a", "text": 3}')
    assert load_samples(path, "body").samples[0].text == "a"


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    assert len(load_samples(write(tmp_path / "s.jsonl", b'\xef\xbb\xbf{"text": "a"}'))) == 1


def test_samples_without_text_are_left_out_and_counted(tmp_path: Path) -> None:
    file = load_samples(texts(tmp_path / "s.jsonl", "a", "", "  \n", "b"))
    assert [sample.text for sample in file.samples] == ["a", "b"]
    assert file.empty == 2


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("not json", "line 2: not JSON"),
        ('{"text": "a"', "line 2: not JSON"),
        (b'{"text": "\xff"}', "line 2: not JSON (not UTF-8)"),
        ('["a"]', "line 2: a JSON array"),
        ('"a"', "line 2: a JSON string"),
        ("null", "line 2: a JSON null"),
        ('{"content": "a", "id": 1}', "line 2: no field 'text'; it has: content, id"),
        ("{}", "line 2: no field 'text'; it has: none"),
        ('{"text": 7}', "line 2: 'text' is a JSON number, not a string"),
        ('{"text": null}', "line 2: 'text' is a JSON null"),
        ('{"text": {}}', "line 2: 'text' is a JSON object"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str | bytes, complaint: str) -> None:
    path = write(tmp_path / "s.jsonl", '{"text": "fine"}', line)
    with pytest.raises(SampleError) as error:
        load_samples(path)
    assert str(path) in str(error.value)
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_without_samples(tmp_path: Path) -> None:
    with pytest.raises(SampleError, match="no such file"):
        load_samples(tmp_path / "missing.jsonl")
    with pytest.raises(SampleError, match="is a directory"):
        load_samples(tmp_path)
    with pytest.raises(SampleError, match=r"s\.jsonl: is empty"):
        load_samples(write(tmp_path / "s.jsonl", "", "  "))
    with pytest.raises(SampleError, match="all 2 samples have an empty 'text'"):
        load_samples(texts(tmp_path / "s.jsonl", "", " "))


def test_fewer_than_the_minimum_must_be_meant() -> None:
    path = Path("s.jsonl")
    assert require_enough(path, 500, 256, allow_few=False) == 256
    assert require_enough(path, MINIMUM, 256, allow_few=False) == MINIMUM
    assert require_enough(path, 3, 256, allow_few=True) == 3
    with pytest.raises(SampleError, match=r"s\.jsonl: 127 samples.*128.*--allow-few-samples"):
        require_enough(path, 127, 256, allow_few=False)
    with pytest.raises(SampleError, match=r"--count 64.*--allow-few-samples"):
        require_enough(path, 500, 64, allow_few=False)


def test_golden_prompts_come_from_what_is_not_calibrated(tmp_path: Path) -> None:
    file = load_samples(texts(tmp_path / "s.jsonl", *(f"text {i}" for i in range(140))))
    split = split_samples(file, None, 130, allow_few=False)
    assert [sample.text for sample in split.held_out] == [f"text {i}" for i in range(130, 140)]
    assert split.facts["also_calibrated"] == 0
    assert not split.warnings

    other = load_samples(texts(tmp_path / "h.jsonl", "text 5", "new"))
    split = split_samples(file, other, 130, allow_few=False)
    assert split.facts["also_calibrated"] == 1
    assert split.facts["sha256"] == other.sha256
    assert "1 held-out samples are also calibration samples" in split.warnings


def test_nothing_held_out_is_said_loudly(tmp_path: Path) -> None:
    file = load_samples(texts(tmp_path / "s.jsonl", *(f"text {i}" for i in range(130))))
    split = split_samples(file, None, 256, allow_few=False)
    assert split.held_out == split.calibration
    assert split.facts["also_calibrated"] == 130
    assert any("no sample is held out" in warning for warning in split.warnings)
    assert any("256 were asked for" in warning for warning in split.warnings)
