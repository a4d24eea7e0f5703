"""Streams of tagged samples: what is read in which order, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from calibrate.samples.sample import Fields
from calibrate.samples.stream import MOST_DOMAINS, open_stream, steps_of
from octet.errors import SampleError

GOOD = {"domain": "prose", "text": "one"}


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_steps_follow_the_file_and_hold_one_domain(tmp_path: Path) -> None:
    domains = "aaaabba"
    path = write(
        tmp_path / "s.jsonl",
        *({"domain": x, "text": f"text {n}"} for n, x in enumerate(domains)),
        {"domain": "a", "text": " "},
        {"domain": "chat", "messages": [{"role": "user", "content": "hello"}]},
    )
    stream = open_stream(path, Fields())
    assert stream.samples == {"a": 5, "b": 2, "chat": 1} and stream.empty == 1
    steps = list(steps_of(stream.read(), 3))
    assert [(domain, len(samples)) for domain, samples in steps] == [
        *(("a", 3), ("a", 1), ("b", 2), ("a", 1), ("chat", 1))
    ]
    assert steps[2][1][0].text == "text 4" and steps[2][1][0].origin == "s.jsonl, line 5"


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([GOOD, {"text": "two"}], "line 2: no field 'domain'; it has: text"),
        ([GOOD, {"domain": "prose"}], "line 2: no field 'text' or 'messages'; it has: domain"),
        ([{"domain": 7, "text": "x"}], "line 1: 'domain' is a JSON number, not a string"),
        ([{"domain": " ", "text": "x"}], "line 1: 'domain' must be 1 to 40 printable characters"),
        ([{"domain": "a\nb", "text": "x"}], "'domain' must be 1 to 40 printable characters"),
        ([GOOD, ["x"]], "line 2: a JSON array; each line must be an object"),
        ([], "is empty; a stream needs a domain and a text on each line"),
        ([{"domain": "a", "text": ""}], "all 1 samples are empty"),
        (
            [{"domain": str(n), "text": "x"} for n in range(MOST_DOMAINS + 1)],
            "more than 16 domains, such as 16; tag the samples with kinds of text",
        ),
    ],
)
def test_a_line_that_cannot_be_used_is_named(records: list[Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(SampleError) as error:
        open_stream(write(tmp_path / "s.jsonl", *records), Fields())
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_stream_is_one_jsonl_file(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    write(tmp_path / "texts" / "a.jsonl", GOOD)
    for path, kind in ((tmp_path / "texts", "1 JSONL file"), (tmp_path / "x.txt", "text, ")):
        if path.suffix:
            path.write_text("one\n")
        with pytest.raises(SampleError, match=f"{kind}.*; a stream is one JSONL file"):
            open_stream(path, Fields())
    with pytest.raises(SampleError, match="no such file"):
        open_stream(tmp_path / "none.jsonl", Fields())
