"""Asking, keeping, going on, and comparing; with targets that answer from a table."""

import io
import json
import string
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from octet.errors import ArtifactError, BackendError, ConfigError, NumericsError, SampleError
from verify.evaluation.comparison import Comparison, compare
from verify.evaluation.console import render
from verify.evaluation.evaluator import evaluate
from verify.evaluation.sequences import Sequences, read_texts
from verify.evaluation.target import Answer, top_k

VOCABULARY, K = 50, 5
LETTERS = string.ascii_lowercase


class Table:
    """A model whose logits after a token follow from that token, moved by `noise`."""

    longest = None
    lasting = True
    vocabulary: int | None = VOCABULARY

    def __init__(self, name: str, noise: float, identity: str = "1") -> None:
        self.name, self.identity = name, {"table": identity}
        self.asked: list[tuple[int, ...]] = []
        self.fails_after: int | None = None
        generator = np.random.default_rng(0)
        logits = 2 * generator.normal(size=(VOCABULARY, VOCABULARY))
        moved = np.random.default_rng(len(name)).normal(size=logits.shape)
        logits += noise * moved
        self.rows = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))

    def encode(self, text: str) -> list[int] | None:
        return [ord(character) % VOCABULARY for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(letter for i in ids for letter in LETTERS if ord(letter) % VOCABULARY == i)

    def answers(self, samples: Sequence[Sequence[int]], k: int) -> Iterator[tuple[int, Answer]]:
        for index in reversed(range(len(samples))):  # any order is allowed
            if self.fails_after is not None and len(self.asked) == self.fails_after:
                raise BackendError("it died")
            ids = samples[index]
            self.asked.append(tuple(ids))
            rows = self.rows[list(ids[:-1])]
            chosen = rows[np.arange(len(rows)), ids[1:]].astype(np.float32)
            yield index, Answer(chosen, *top_k(rows, k))


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    path = tmp_path / "samples.jsonl"
    generator = np.random.default_rng(3)
    texts = ("".join(chr(97 + i) for i in generator.integers(0, 26, n)) for n in range(10, 34))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def read(path: Path, **options: int) -> Sequences:
    target = Table("reader", 0)
    return read_texts(path, lambda text: target.encode(text) or [], max_length=64, **options)


def run(
    sequences: Sequences, *targets: Table, out: Path | None = None, notes: list[str] | None = None
) -> Comparison:
    told = [] if notes is None else notes
    return compare(
        evaluate(targets, Table("reference", 0), sequences, k=K, out=out, note=told.append)
    )


def test_rows_compare_on_the_same_tokens(samples: Path) -> None:
    sequences = read(samples)
    near, far, same = Table("near", 0.05), Table("far", 0.5), Table("same", 0.0)
    result = run(sequences, near, far, same)
    assert result.tokens == sequences.tokens and result.samples == 24
    first, second, third = result.rows
    assert first.kl and second.kl and third.kl and first.kl_p90 and second.kl_p90
    assert 0 < first.kl.low < first.kl.mean < first.kl.high < second.kl.low
    assert first.kl_p90 < second.kl_p90 and first.kl_from_first is None
    assert second.kl_from_first and second.kl_from_first.low > 0
    assert second.kl_from_first.mean == pytest.approx(second.kl.mean - first.kl.mean)
    assert (third.kl.low, third.kl.high) == (0.0, 0.0)  # the reference itself
    assert third.change and third.change.mean == 0.0
    assert result.reference_perplexity
    ratio = second.perplexity.mean / result.reference_perplexity.mean
    assert second.change and second.change.mean == pytest.approx(ratio - 1)


def test_the_paired_interval_is_narrower_than_that_of_either(samples: Path) -> None:
    _, second = run(read(samples), Table("a", 0.1), Table("bb", 0.1)).rows
    assert second.change_from_first
    paired = second.change_from_first.high - second.change_from_first.low
    alone = (second.perplexity.high - second.perplexity.low) / second.perplexity.mean
    assert paired < alone / 3


def test_an_interrupted_evaluation_goes_on_and_gives_the_same_figures(
    samples: Path, tmp_path: Path
) -> None:
    sequences = read(samples)
    whole = run(sequences, Table("far", 0.5))
    dying = Table("far", 0.5)
    dying.fails_after = 7
    with pytest.raises(BackendError, match="died"):
        run(sequences, dying, out=tmp_path / "out")
    again = Table("far", 0.5)
    notes: list[str] = []
    assert run(sequences, again, out=tmp_path / "out", notes=notes) == whole
    assert len(again.asked) == 24 - 7 and not set(again.asked) & set(dying.asked)
    third = Table("far", 0.5)
    assert run(sequences, third, out=tmp_path / "out", notes=notes) == whole
    assert third.asked == [] and notes == []


def test_a_line_cut_off_at_the_end_is_asked_again(samples: Path, tmp_path: Path) -> None:
    sequences = read(samples)
    whole = run(sequences, Table("far", 0.5), out=tmp_path)
    (path,) = tmp_path.glob("far-*.jsonl")
    path.write_bytes(path.read_bytes()[:-100])
    again = Table("far", 0.5)
    assert run(sequences, again, out=tmp_path) == whole
    assert len(again.asked) == 1
    lines = path.read_bytes().splitlines()
    lines[3] = lines[3][:50]
    path.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(ArtifactError, match=r"line 4: damaged since it was written"):
        run(sequences, Table("far", 0.5), out=tmp_path)


def test_what_has_changed_is_named(samples: Path, tmp_path: Path) -> None:
    run(read(samples), Table("far", 0.5), out=tmp_path)
    notes: list[str] = []
    changed = Table("far", 0.4, identity="2")
    run(read(samples), changed, out=tmp_path, notes=notes)
    assert len(changed.asked) == 24
    assert len(notes) == 1 and "far has changed" in notes[0] and "table was 1, is 2" in notes[0]
    lines = samples.read_text().splitlines()
    samples.write_text("\n".join([*lines[:-1], json.dumps({"text": "other"})]) + "\n")
    notes.clear()
    edited = Table("far", 0.4, identity="2")
    run(read(samples), edited, out=tmp_path, notes=notes)
    assert len(edited.asked) == 1
    assert all("samples.jsonl has changed" in n and "23 of 24 samples are" in n for n in notes)
    assert {"far" in note or "reference" in note for note in notes} == {True}


def test_a_server_that_serves_something_else_now_is_noticed(samples: Path, tmp_path: Path) -> None:
    sequences = read(samples)
    notes: list[str] = []
    for noise in (0.5, 0.5, 0.4):
        server = Table("server", noise)
        server.lasting = False
        if noise == 0.5:
            server.fails_after = 7
            with pytest.raises(BackendError):
                run(sequences, server, out=tmp_path, notes=notes)
            assert notes == []
        else:
            run(sequences, server, out=tmp_path, notes=notes)
    (line,) = notes
    assert "server answers samples.jsonl, line" in line and "give another --out" in line


@pytest.mark.parametrize("count", [1, 5])
def test_too_few_samples_are_said(samples: Path, count: int) -> None:
    result = run(read(samples, count=count), Table("far", 0.5))
    (warning,) = result.warnings
    assert "one sample" in warning if count == 1 else "5 samples" in warning
    low = result.as_json()["rows"][0]["kl"]["low"]
    assert low is None if count == 1 else low < result.rows[0].kl_p90


def test_another_model_is_refused(samples: Path) -> None:
    small = Table("small", 0.1)
    small.vocabulary = 20
    with pytest.raises(ConfigError, match=r"small: has 20 tokens.*hold token"):
        run(read(samples), small)

    class Other(Table):
        def encode(self, text: str) -> list[int]:
            return [1, 2, 3]

    with pytest.raises(ConfigError, match=r"tokenizer makes other tokens of samples.jsonl, line 1"):
        run(read(samples), Other("other", 0.1))


def test_nan_names_the_sample(samples: Path, tmp_path: Path) -> None:
    broken = Table("broken", 0.1)
    broken.rows[5, 5] = np.nan
    with pytest.raises(NumericsError, match=r"broken: NaN or Inf for samples.jsonl, line \d+"):
        run(read(samples), broken, out=tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("", "no sample has two tokens"),
        ('{"text": ""}\n', "no sample has two tokens"),
        ('{"text": "fine"}\n{"other": "x"}\n', "line 2: not a JSON object with the field 'text'"),
        ("not json\n", "line 1: not a JSON object"),
        ('{"text": 5}\n', "line 1: 'text' is not a string"),
    ],
)
def test_samples_that_cannot_be_scored_are_one_clear_error(
    tmp_path: Path, content: str | None, message: str
) -> None:
    path = tmp_path / "samples.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SampleError, match=message) as caught:
        read(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("width", [40, 80])
def test_the_table_fits_the_terminal(samples: Path, width: int) -> None:
    result = run(read(samples), Table("/models/a-rather-long-name-onnx", 0.1), Table("b", 0.5))
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(render(result))
    text = console.export_text()
    kl = result.rows[1].kl
    assert kl is not None and f"{1000 * kl.mean:.1f}" in text
    kl = result.rows[1].kl_from_first
    assert kl is not None and f"{1000 * kl.mean:+.1f}" in text
    assert max(map(len, text.splitlines())) <= width and "…" not in text
