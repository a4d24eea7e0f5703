"""Samples are read, or refused in one line that names the place."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from calibrate.samples.source import MINIMUM, Sample, load_samples, require_enough
from octet.errors import SampleError


def write(path: Path, *lines: str | bytes) -> Path:
    path.write_bytes(b"\n".join(x if isinstance(x, bytes) else x.encode() for x in lines))
    return path


def texts(path: Path, *values: str) -> Path:
    return write(path, *(json.dumps({"text": value}) for value in values))


def test_reads_texts_in_order_with_their_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "s.jsonl", '{"text": "a"}', "", '{"text": "é\\n", "n": 1}', "")
    file = load_samples(path)
    assert file.samples == (Sample("a", "s.jsonl, line 1"), Sample("é\n", "s.jsonl, line 3"))
    assert file.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert file.kind == "JSONL"


def test_another_text_field(tmp_path: Path) -> None:
    path = write(tmp_path / "s.jsonl", '{"body": "a", "text": 3}')
    assert load_samples(path, "body").samples[0].text == "a"


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    file = load_samples(write(tmp_path / "s.jsonl", b'\xef\xbb\xbf{"text": "a"}'))
    assert [sample.text for sample in file.samples] == ["a"]


def test_samples_without_text_are_left_out_and_counted(tmp_path: Path) -> None:
    file = load_samples(texts(tmp_path / "s.jsonl", "a", "", "  \n", "b", ""))
    assert file.first(None) == ((Sample("a", "s.jsonl, line 1"), Sample("b", "s.jsonl, line 4")), 3)
    assert file.first(1) == ((Sample("a", "s.jsonl, line 1"),), 0)


def test_no_more_is_read_than_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "s.jsonl", '{"text": "a"}', '{"text": "b"}', "broken")
    file = load_samples(path)
    assert [sample.text for sample in file.first(2)[0]] == ["a", "b"]
    with pytest.raises(SampleError, match="line 3"):
        file.first(3)


CONVERSATION = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


def test_a_line_is_a_text_or_a_conversation(tmp_path: Path) -> None:
    parts = [
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}
    ]
    speakers = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]
    calls = [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]
    records = [
        {"text": "a"},
        {"messages": CONVERSATION},
        {"messages": parts},
        {"messages": speakers},
        {"messages": calls},
        {"text": None, "messages": CONVERSATION},
        {"text": "both", "messages": CONVERSATION},
        {"messages": []},
    ]
    file = load_samples(write(tmp_path / "s.jsonl", *map(json.dumps, records)))
    read, empty = file.first(None)
    assert [list(sample.messages) for sample in read] == [
        [],
        CONVERSATION,
        [{"role": "user", "content": "hi"}],
        CONVERSATION,
        [{"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}],
        CONVERSATION,
        [],
    ]
    assert [sample.text for sample in read if not sample.messages] == ["a", "both"]
    assert empty == 1


def test_another_messages_field(tmp_path: Path) -> None:
    path = write(tmp_path / "s.jsonl", json.dumps({"conversations": CONVERSATION}))
    assert (
        list(load_samples(path, messages_field="conversations").samples[0].messages) == CONVERSATION
    )


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("not json", "line 2: not JSON"),
        ('{"text": "a"', "line 2: not JSON"),
        (b'{"text": "\xff"}', "line 2: not JSON (not UTF-8)"),
        ("[" * 100_000, "line 2: not JSON"),
        ('{"text": ' + "9" * 5000 + "}", "line 2: not JSON (Exceeds"),
        ('["a"]', "line 2: a JSON array"),
        ('"a"', "line 2: a JSON string"),
        ("null", "line 2: a JSON null"),
        ('{"content": "a", "id": 1}', "line 2: no field 'text' or 'messages'; it has: content, id"),
        ("{}", "line 2: no field 'text' or 'messages'; it has: none"),
        ('{"text": 7}', "line 2: 'text' is a JSON number, not a string"),
        ('{"text": null}', "line 2: 'text' is a JSON null"),
        ('{"text": {}}', "line 2: 'text' is a JSON object"),
        ('{"text": "\\ud800"}', "line 2: 'text' holds a lone surrogate"),
        ('{"messages": null}', "line 2: 'messages' is null"),
        ('{"messages": "hi"}', "line 2: 'messages' is a JSON string, not a list of messages"),
        ('{"messages": ["hi"]}', "line 2: 'messages', message 1 is a JSON string"),
        ('{"messages": [{"content": "hi"}]}', "message 1 has no 'role'"),
        ('{"messages": [{"role": 1, "content": "hi"}]}', "message 1 has no 'role'"),
        ('{"messages": [{"role": "user"}]}', "message 1 (user): its content is a JSON null"),
        ('{"messages": [{"from": "gpt"}]}', "message 1 (assistant): its content is a JSON null"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
            "message 1 (user) has a part of type image_url; only text can be read",
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str | bytes, complaint: str) -> None:
    path = write(tmp_path / "s.jsonl", '{"text": "fine"}', line)
    with pytest.raises(SampleError) as error:
        load_samples(path).first(None)
    assert str(path) in str(error.value)
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_without_samples(tmp_path: Path) -> None:
    with pytest.raises(SampleError, match="no such file"):
        load_samples(tmp_path / "missing.jsonl")
    with pytest.raises(SampleError, match=r"s\.jsonl: is empty"):
        load_samples(write(tmp_path / "s.jsonl", "", "  "))
    with pytest.raises(SampleError, match="all 2 samples are empty"):
        load_samples(texts(tmp_path / "s.jsonl", "", " "))


def test_fewer_than_the_minimum_must_be_meant() -> None:
    path = Path("s.jsonl")
    assert require_enough(path, 500, 256, MINIMUM) == 256
    assert require_enough(path, MINIMUM, 256, MINIMUM) == MINIMUM
    assert require_enough(path, 3, 256, 1) == 3
    with pytest.raises(SampleError, match=r"s\.jsonl: 127 samples.*128.*--allow-few-samples"):
        require_enough(path, 127, 256, MINIMUM)
    with pytest.raises(SampleError, match=r"--count 64.*--allow-few-samples"):
        require_enough(path, 500, 64, MINIMUM)


# A file in another form -> the line after its path.
OTHERS: dict[str, tuple[str, bytes, str]] = {
    "CSV": (
        "s.csv",
        b"text,label\n'x',1\n",
        "a table of CSV, which is not read; convert it: python -c",
    ),
    "TSV": ("s.tsv", b"text\tlabel\nx\t1\n", "a table of TSV, which is not read; convert it: "),
    "a JSON array": ("s.json", b' [{"text": "x"}]', "one JSON array; write each of its items on"),
    "one in JSONL's name": ("s.jsonl", b'[\n{"text": "x"}]', "one JSON array; write each of its"),
    "gzip": ("s.jsonl.gz", b"\x1f\x8b\x08\x00", "compressed with gzip; unpack it: gunzip -k "),
    "zstd": ("s.jsonl.zst", b"\x28\xb5\x2f\xfd", "compressed with zstd; unpack it: zstd -d "),
    "xz": ("s.jsonl.xz", b"\xfd7zXZ\x00", "compressed with xz; unpack it: xz -dk "),
    "Excel": ("s.xlsx", b"PK\x03\x04", "a ZIP or Excel file; unpack it, or save it as JSONL"),
    "PDF": ("s.pdf", b"%PDF-1.7", "a PDF file; save its text as .txt"),
    "Arrow": ("data.arrow", b"ARROW1\x00\x00", "an Arrow file; give the directory that save_to"),
    "a Git LFS pointer": (
        "s.jsonl",
        b"version https://git-lfs.github.com/spec/v1\n",
        "a Git LFS pointer, not the file itself: run `git lfs pull` in its directory",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_samples_in_another_form_are_recognised(case: str, tmp_path: Path) -> None:
    name, content, line = OTHERS[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SampleError) as refused:
        load_samples(tmp_path / name)
    assert str(refused.value).startswith(f"{tmp_path / name}: {line}")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("s.csv", 'text,label\n"a, b",1\nc,2\n'),
        ("s.tsv", "text\tlabel\na, b\t1\nc\t2\n"),
        ("s.json", '[{"text": "a, b"}, {"text": "c"}]'),
    ],
)
def test_the_command_that_converts_them_works(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(SampleError) as refused:
        load_samples(tmp_path / name)
    command = str(refused.value).partition("python -c")[2].partition(", and name")[0]
    subprocess.run(f"{sys.executable} -c{command}", shell=True, check=True, cwd=tmp_path)
    assert [x.text for x in load_samples(tmp_path / "s.jsonl").samples] == ["a, b", "c"]


def test_a_data_set_on_the_hub_has_to_be_downloaded() -> None:
    with pytest.raises(SampleError, match="first: hf download HuggingFaceH4/x --repo-type dataset"):
        load_samples(Path("HuggingFaceH4/x"))


def test_a_directory_of_another_kind_says_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(b"")
    with pytest.raises(SampleError, match=r"nor is it .*; it has \.jsonl\.gz files"):
        load_samples(tmp_path)
