"""Every source of the same texts gives the same samples, and a bad one is refused by name."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from calibrate.samples.source import Sample, load_samples
from octet.errors import SampleError

TEXTS = ["def f(x):\n    return x + 1", "Größe: 3 µm\n  indented", "a\n\tb", "última línea"]
SAVED = Path(__file__).parents[1] / "data" / "saved_dataset"  # by save_to_disk of datasets 5.2.0


def jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def blank_lines(path: Path) -> Path:
    file = path / "s.txt"
    file.write_text("\n" + "\n \n\n".join(TEXTS) + "\n")
    return file


def windows_lines(path: Path) -> Path:
    file = path / "s.txt"
    file.write_bytes(b"\xef\xbb\xbf" + "\r\n\r\n".join(TEXTS).encode())
    return file


def form_feeds(path: Path) -> Path:
    file = path / "s.txt"
    file.write_text("\n\f\n".join(TEXTS) + "\f")
    return file


def files(path: Path) -> Path:
    for index, text in enumerate(TEXTS):
        (path / f"part-{index // 2}").mkdir(exist_ok=True)
        (path / f"part-{index // 2}" / f"{index}.txt").write_text(text)
    (path / "README.md").write_text("no sample")
    (path / ".hidden").mkdir()
    (path / ".hidden" / "x.txt").write_text("no sample")
    return path


def jsonl_files(path: Path) -> Path:
    jsonl(path / "b.jsonl", TEXTS[3:])
    jsonl(path / "a.jsonl", TEXTS[:3])
    return path


def parquet(path: Path) -> Path:
    table = pa.table({"n": list(range(len(TEXTS))), "text": TEXTS})
    pq.write_table(table, path / "s.parquet", row_group_size=3)
    return path / "s.parquet"


def parquet_files(path: Path) -> Path:
    encoded = pa.array(TEXTS[:3]).dictionary_encode()
    pq.write_table(pa.table({"text": encoded}), path / "train-00000-of-00002.parquet")
    large = pa.array(TEXTS[3:], pa.large_string())
    pq.write_table(pa.table({"text": large}), path / "train-00001-of-00002.parquet")
    return path


def saved_dataset(path: Path) -> Path:
    names = []
    for index, texts in enumerate((TEXTS[:1], TEXTS[1:])):
        table = pa.table({"text": texts, "n": [0] * len(texts)})
        names.append(f"data-{index:05d}-of-00002.arrow")
        with pa.ipc.new_stream(path / names[-1], table.schema) as stream:
            stream.write_table(table, max_chunksize=2)
    state = {"_data_files": [{"filename": name} for name in names]}
    (path / "state.json").write_text(json.dumps(state))
    return path


SOURCES = [
    (blank_lines, "text, samples separated by blank lines", "s.txt, line 2"),
    (windows_lines, "text, samples separated by blank lines", "s.txt, line 1"),
    (form_feeds, "text, samples separated by form feeds", "s.txt, line 1"),
    (files, "4 text files, one sample each", "part-0/0.txt"),
    (jsonl_files, "2 JSONL files", "a.jsonl, line 1"),
    (parquet, "Parquet", "s.parquet, row 0"),
    (parquet_files, "2 Parquet files", "train-00000-of-00002.parquet, row 0"),
    (saved_dataset, "saved dataset", "source, row 0"),
]


@pytest.mark.parametrize(
    ("make", "kind", "first"), SOURCES, ids=lambda x: getattr(x, "__name__", "")
)
def test_a_source_gives_the_samples_of_the_jsonl(
    make: Callable[[Path], Path], kind: str, first: str, tmp_path: Path
) -> None:
    (tmp_path / "source").mkdir()
    file = load_samples(make(tmp_path / "source"))
    expected = load_samples(jsonl(tmp_path / "s.jsonl", TEXTS))
    assert [s.text for s in file.samples] == [s.text for s in expected.samples]
    assert file.kind == kind
    assert file.samples[0].origin == first
    assert len({sample.origin for sample in file.samples}) == len(TEXTS)
    assert file.samples == file.samples  # read anew each time


def test_the_place_of_a_sample_in_a_text_file(tmp_path: Path) -> None:
    (tmp_path / "s.txt").write_text("a\nb\n\n\n  c\n\nd")
    samples = load_samples(tmp_path / "s.txt").samples
    assert samples == (
        Sample("a\nb", "s.txt, line 1"),
        Sample("  c", "s.txt, line 5"),
        Sample("d", "s.txt, line 7"),
    )
    (tmp_path / "s.txt").write_text("a\n\nb\n\f\nc\fd")
    samples = load_samples(tmp_path / "s.txt").samples
    assert samples == (
        Sample("a\n\nb", "s.txt, line 1"),
        Sample("c", "s.txt, line 5"),
        Sample("d", "s.txt, line 5"),
    )


def test_a_dataset_that_datasets_itself_saved() -> None:
    conversation = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"})
    assert load_samples(SAVED / "train").samples == (
        Sample("def f(x):\n    return x\n", "train, row 0"),
        Sample("", "train, row 1", conversation),
        Sample("é ü", "train, row 2"),
    )
    with pytest.raises(SampleError, match=r"has the splits train; name one, such as .*/train$"):
        load_samples(SAVED)


def test_conversations_in_a_table_lose_only_what_is_null(tmp_path: Path) -> None:
    rows = [
        [{"role": "user", "content": "hi", "name": "bo"}],
        [{"role": "user", "content": "yo", "name": None}],
    ]
    pq.write_table(pa.table({"chat": rows}), tmp_path / "s.parquet")
    samples = load_samples(tmp_path / "s.parquet", messages_field="chat").samples
    assert samples[0].messages == ({"role": "user", "content": "hi", "name": "bo"},)
    assert samples[1].messages == ({"role": "user", "content": "yo"},)


def test_the_hash_is_of_names_and_contents(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for path in (one, two):
        path.mkdir()
        files(path)
    before = load_samples(one).sha256
    assert load_samples(two).sha256 == before
    (two / "part-0" / "0.txt").rename(two / "part-0" / "00.txt")
    assert load_samples(two).sha256 != before
    (one / "part-1" / "3.txt").write_text("changed")
    assert load_samples(one).sha256 != before


def complaint_about(path: Path) -> str:
    with pytest.raises(SampleError) as error:
        load_samples(path).first(None)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "s.txt").write_bytes(b"fine\n\nGr\xf6\xdfe")
    assert "s.txt, line 3: not UTF-8 (byte 0xf6)" in complaint_about(tmp_path / "s.txt")
    assert "s.txt: not UTF-8 (byte 0xf6)" in complaint_about(tmp_path)
    bad = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xf6")]
    )
    pq.write_table(pa.table({"text": bad}), tmp_path / "s.parquet")
    assert "row 1: not UTF-8" in complaint_about(tmp_path / "s.parquet")


def test_empty_files(tmp_path: Path) -> None:
    (tmp_path / "s.txt").write_text("\n \n")
    assert "all 1 samples are empty" in complaint_about(tmp_path)
    assert "s.txt: is empty" in complaint_about(tmp_path / "s.txt")
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "s.parquet")
    assert "is empty" in complaint_about(tmp_path / "s.parquet")


@pytest.mark.parametrize(
    ("columns", "complaint"),
    [
        ({"body": ["a"], "n": [1]}, "no column 'text' or 'messages'; it has: body, n"),
        ({"text": [1]}, "column 'text' is int64, not text (--text-field chooses)"),
        ({"text": [b"a"]}, "column 'text' is binary, not text"),
        ({"messages": ["hi"]}, "column 'messages' is string, not lists of messages"),
        ({"messages": [["hi"]]}, "row 0: 'messages', message 1 is a JSON string"),
        ({"text": ["a", None]}, "row 1: 'text' is a JSON null"),
        (
            {"text": ["a", None], "messages": [None, [{"role": "user", "content": None}]]},
            "row 1: 'messages', message 1 (user): its content is a JSON null",
        ),
    ],
)
def test_a_table_of_other_things(
    columns: dict[str, list[object]], complaint: str, tmp_path: Path
) -> None:
    pq.write_table(pa.table(columns), tmp_path / "s.parquet")
    assert complaint in complaint_about(tmp_path / "s.parquet")


def test_a_table_that_cannot_be_read(tmp_path: Path) -> None:
    path = parquet(tmp_path)
    whole = path.read_bytes()
    for content in (b"", b"PAR1", whole[: len(whole) // 2], whole[:4] + whole[40:]):
        path.write_bytes(content)
        assert "not a readable Parquet file" in complaint_about(path)


def test_a_saved_dataset_that_cannot_be_read(tmp_path: Path) -> None:
    path = saved_dataset(tmp_path)
    shard = path / "data-00001-of-00002.arrow"
    shard.write_bytes(shard.read_bytes()[:-200])
    with pytest.raises(SampleError, match=r"data-00001-of-00002\.arrow: not a readable Arrow file"):
        load_samples(path).first(None)
    shard.unlink()
    with pytest.raises(SampleError, match=r"00002\.arrow: no such file, but state\.json lists it"):
        load_samples(path)
    (path / "state.json").write_text('{"_data_files": "x"}')
    assert "lists no data files" in complaint_about(path)
    (path / "state.json").write_text("{")
    assert "not valid JSON" in complaint_about(path)


def test_a_directory_that_is_neither(tmp_path: Path) -> None:
    assert "no .txt, .jsonl or .parquet files" in complaint_about(tmp_path)
    (tmp_path / "s.txt").write_text("a")
    parquet(tmp_path)
    assert "holds Parquet and text files; give a directory of one kind" in complaint_about(tmp_path)


def test_what_the_system_refuses(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in complaint_about(tmp_path / "pipe")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(SampleError, match=r"gone\.txt: no such file"):
        load_samples(tmp_path)
    assert "File name too long" in complaint_about(tmp_path / ("x" * 300))


def test_without_pyarrow_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = parquet(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(SampleError, match=r"needs pyarrow: pip install 'octet-llm\[datasets\]'"):
        load_samples(path)
    with pytest.raises(SampleError, match=r"needs pyarrow: pip install 'octet-llm\[datasets\]'"):
        load_samples(SAVED / "train")
