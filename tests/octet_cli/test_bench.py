"""`octet bench`, from the command line to what it prints, with a fake load generator."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.command import octet
from tests.layout import ROOT
from tests.serve.evaluation.prompt_server import as_vllm, running
from tests.verify.bench.fake_vllm import install

LOAD = ("--load", "1x8x4", "--rounds", "2", "--requests", "2")


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[object, ...]:
    monkeypatch.setenv("FAKE_VLLM_CALLS", str(tmp_path / "calls"))
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    return ("--vllm", install(tmp_path), "--tokenizer", tmp_path / "tokenizer", *LOAD)


def refused(*arguments: object) -> str:
    done = octet("bench", *arguments)
    assert done.returncode == 2 and "\n" not in done.stderr.strip(), done.stderr
    return done.stderr


def test_speed_and_quality_are_in_one_answer(
    options: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples, page = tmp_path / "samples.jsonl", tmp_path / "page.html"
    samples.write_text("".join(json.dumps({"text": "abc" * (i + 2)}) + "\n" for i in range(9)))
    with running(as_vllm) as one, running(as_vllm) as other:
        monkeypatch.setenv("FAKE_VLLM_SPEEDS", json.dumps({other.url: 200.0}))
        more = ("--samples", samples, "--top-k", 5, "--out", tmp_path / "out", "--html", page)
        done = octet("bench", one.url, other.url, *options, *more, "--json")
        assert done.returncode == 0, done.stderr
        shown = octet("bench", one.url, other.url, *options, *more)
    data: dict[str, Any] = json.loads(done.stdout)
    assert data["targets"] == [one.url, other.url] and data["loads"] == ["1x8x4"]
    assert data["cells"][0][1]["ratios"]["tokens_per_s"]["median"] == pytest.approx(2)
    assert data["quality"]["rows"][1]["change"]["mean"] == 0
    assert "to target 1" in shown.stdout and "perplexity" in shown.stdout
    assert len((tmp_path / "calls").read_text().splitlines()) == 6  # the second run measured none
    assert 'id="quality"' in page.read_text()


def test_what_cannot_be_measured_is_refused_before_the_first_run(
    options: tuple[object, ...], tmp_path: Path
) -> None:
    with running(as_vllm) as server:
        url = server.url
        assert "127.0.0.1:9" in refused(url, "http://127.0.0.1:9", *options)
        assert "has no model 'other'" in refused(url, f"{url}/other", *options)
        long = refused(url, url, *options, "--load", "1x120x9")
        assert "has a context of 128 tokens, and --load 1x120x9 needs 129" in long
    assert not (tmp_path / "calls").exists()


def test_a_failed_request_says_where_and_how_to_continue(
    options: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM_FAULT", "fails")
    with running(as_vllm) as server:
        line = refused(server.url, server.url, *options, "--out", tmp_path / "out")
    assert "1 of 1 requests failed" in line and "the same command continues from there" in line


def test_ending_it_ends_the_generator(options: tuple[object, ...], tmp_path: Path) -> None:
    stuck = tmp_path / "stuck"
    stuck.write_text(f"#!/bin/sh\necho $$ > {tmp_path / 'pid'}\nexec sleep 600\n")
    stuck.chmod(0o755)
    with running(as_vllm) as server:
        words = [server.url, server.url, *map(str, options), "--vllm", str(stuck)]
        command = [sys.executable, "-m", "octet", "bench", *words]
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
            try:
                deadline = time.monotonic() + 60
                while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
                    assert process.poll() is None and time.monotonic() < deadline
                    time.sleep(0.05)
                process.send_signal(signal.SIGTERM)
                _, errors = process.communicate(timeout=30)
            finally:
                process.kill()
    assert process.returncode == 130 and "with --out DIR" in errors
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()


def test_options_of_vllm_that_no_shell_could_split_are_one_line(
    options: tuple[object, ...], tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    model = tmp_path / "model"
    for words in (("bench", model, model, *options), ("prewarm", model)):
        done = octet(*words, "--vllm-options", "--served-model-name 'a b")
        assert done.returncode == 2
        assert (
            done.stderr == "error: --vllm-options --served-model-name 'a b: No closing quotation\n"
        )
