"""`octet evaluate`, from the command line to the files that it leaves."""

import errno
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from octet.errors import BackendError, ConfigError, OctetError, UnsupportedError
from octet_cli.main import app
from tests.serve.evaluation.prompt_server import as_vllm, running
from verify.evaluation import lm_eval as harness_module

OCTET = [sys.executable, "-m", "octet"]


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(json.dumps({"text": chr(97 + i) * (i + 3)}) + "\n" for i in range(10)))
    return path


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["evaluate", *map(str, arguments)], catch_exceptions=True)


def answered(*arguments: object) -> dict[str, Any]:
    done = invoke(*arguments, "--json")
    assert done.exit_code == 0, done.exception
    return dict(json.loads(done.stdout))


def refused(*arguments: object) -> OctetError:
    done = invoke(*arguments)
    assert isinstance(done.exception, OctetError), done
    return done.exception


def test_servers_alone_are_compared_by_their_own_tokens(samples: Path, tmp_path: Path) -> None:
    with running(as_vllm) as one, running(as_vllm) as other:
        done = answered(one.url, other.url, "--samples", samples, "--top-k", 5)
    assert [row["name"] for row in done["rows"]] == [one.url, other.url]
    assert done["tokens"] == sum(i + 2 for i in range(10)) and done["perplexity"] > 1
    assert done["rows"][1]["change"] == {"mean": 0.0, "low": 0.0, "high": 0.0}


def test_the_table_is_readable_in_a_pipe(
    samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    with running(as_vllm, [{"id": "a-name/as-long-as-they-are-on-the-hub-fp8-dynamic"}]) as fake:
        name = f"{fake.url}/a-name/as-long-as-they-are-on-the-hub-fp8-dynamic"
        shown = invoke(name, name, "--samples", samples, "--top-k", 5).stdout
        one = invoke(name, "--samples", samples, "--top-k", 5, "--count", 1).stdout
    first, *_ = (line for line in shown.splitlines() if name in line)
    assert name in first and "10 samples of" in shown and "+" not in shown
    assert shown.count(" 0.00..0.00") == 2  # both are the first
    assert "1 sample of" in one and "interval, over" not in one and ".." not in one


def test_a_directory_that_another_run_is_writing_is_refused(samples: Path, tmp_path: Path) -> None:
    meanwhile = []

    def answering(body: dict[str, Any]) -> tuple[int, Any]:
        if not meanwhile:
            meanwhile.append(None)
            meanwhile[0] = refused(*options)
        return as_vllm(body)

    with running(answering) as fake:
        options = (fake.url, "--samples", samples, "--top-k", 5, "--out", tmp_path / "out")
        done = answered(*options)
    assert isinstance(meanwhile[0], ConfigError) and "another evaluation" in str(meanwhile[0])
    assert done["tokens"] == sum(i + 2 for i in range(10))


def test_a_server_that_dies_is_gone_on_with(samples: Path, tmp_path: Path) -> None:
    def dying(body: dict[str, Any]) -> tuple[int, Any]:
        return as_vllm(body) if len(fake.asked) <= 4 else (0, {})

    with running(dying) as fake:
        options = (fake.url, "--samples", samples, "--top-k", 5, "--concurrency", 1)
        assert "nothing was kept: with --out DIR" in str(refused(*options))
        fake.asked.clear()
        error = refused(*options, "--out", tmp_path / "out")
        assert isinstance(error, BackendError) and "\n" not in str(error)
        assert f"kept in {tmp_path / 'out'}: the same command continues" in str(error)
        fake.answering = as_vllm
        fake.asked.clear()
        done = answered(*options, "--out", tmp_path / "out")
        assert (
            len(fake.asked) == 7
        )  # six of ten, and one that was kept, to see that it is as it was
        assert done == answered(*options)


def test_an_interruption_leaves_what_was_answered(samples: Path, tmp_path: Path) -> None:
    """SIGINT while a request waits: the answers before it are there, and the way on is said."""
    import signal
    import threading

    waiting, release = threading.Event(), threading.Event()

    def hanging(body: dict[str, Any]) -> tuple[int, Any]:
        if len(fake.asked) > 3:
            waiting.set()
            release.wait(60)
        return as_vllm(body)

    with running(hanging) as fake:
        command = [*OCTET, "evaluate", fake.url, "--samples", str(samples), "--top-k", "5"]
        command += ["--concurrency", "1", "--out", str(tmp_path / "out"), "--json"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert waiting.wait(60)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=600)
        release.set()
    assert process.returncode == 130 and "the same command continues from there" in said
    (path,) = (tmp_path / "out").iterdir()
    assert path.read_text().count('"sample":') == 3


def test_what_cannot_be_asked_is_one_line(samples: Path, tmp_path: Path) -> None:
    with running(as_vllm) as fake:
        assert "nothing to evaluate on" in str(refused(fake.url))
        assert "--samples FILE too" in str(refused(fake.url, "--tasks", "a", "--html", "x.html"))
        assert "no such file" in str(refused(fake.url, "--samples", tmp_path / "absent"))
    error = refused("grpc://127.0.0.1:8001", "--samples", samples)
    assert isinstance(error, UnsupportedError) and "the export or engine" in str(error)
    (tmp_path / "config.json").write_text('{"quantization_config": {}}')
    error = refused(tmp_path, "--samples", samples)
    assert isinstance(error, UnsupportedError) and "is quantized" in str(error)
    error = refused(tmp_path, "--tasks", "arc_easy")
    assert isinstance(error, ConfigError) and "octet serve" in str(error)


HARNESS = """#!{python}
import json, os, sys
from pathlib import Path
arguments = sys.argv[1:]
out = Path(arguments[arguments.index("--output_path") + 1]) / "model"
out.mkdir(parents=True)
kept = {{"arguments": arguments, "key": os.environ.get("OPENAI_API_KEY")}}
Path({kept!r}).write_text(json.dumps(kept))
if "broken" in arguments[arguments.index("--tasks") + 1]:
    sys.exit("no such task: broken")
results = {{"toy": {{"alias": "toy", "acc,none": 0.75, "acc_stderr,none": 0.1,
           "exact_match,strict": 0.5, "exact_match_stderr,strict": "N/A"}}}}
(out / "results_2026.json").write_text(json.dumps({{"results": results}}))
"""


@pytest.fixture(autouse=True)
def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real harness is out of the way where there is one."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        harness_module.importlib.util,
        "find_spec",
        lambda name, *more: None if name == "lm_eval" else find(name, *more),
    )


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A command named lm_eval that takes the real one's arguments and writes its results."""
    kept = tmp_path / "asked.json"
    command = tmp_path / "bin" / "lm_eval"
    command.parent.mkdir()
    command.write_text(HARNESS.format(python=sys.executable, kept=str(kept)))
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}{os.pathsep}{os.environ['PATH']}")
    return kept


def test_tasks_join_the_table(samples: Path, harness: Path, tmp_path: Path) -> None:
    with running(as_vllm) as fake:
        options = (fake.url, "--samples", samples, "--top-k", 5, "--tasks", "toy,other")
        found = answered(*options)["rows"][0]["tasks"]
        shown = invoke(*options).stdout
        alone = answered(fake.url, "--tasks", "toy")["rows"][0]["tasks"]
        assert "no such task: broken; run it yourself to see more: lm_eval run" in str(
            refused(fake.url, "--tasks", "broken")
        )
        page = tmp_path / "page.html"
        lost = invoke(*options[:-1], "broken", "--html", page)
        data = invoke(*options[:-1], "broken", "--json")
    assert found == alone and found["toy acc"]["mean"] == 0.75
    assert found["toy acc"]["high"] == pytest.approx(0.75 + 1.96 * 0.1, abs=1e-3)
    assert found["toy exact_match (strict)"]["low"] is None
    assert "toy acc" in shown and "0.75" in shown and "perplexity" in shown
    assert isinstance(lost.exception, BackendError) and "perplexity" in lost.stdout
    assert page.stat().st_size > 100_000  # what was measured is not lost with the harness
    assert isinstance(data.exception, BackendError)
    assert json.loads(data.stdout)["perplexity"] > 1


def test_the_harness_is_told_what_the_server_can_read(
    samples: Path, harness: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would cut at 2,047 tokens, and send the user's key for OpenAI to any server."""
    monkeypatch.setenv("OPENAI_API_KEY", "for another server")
    monkeypatch.setenv("OURS", "ours")
    with running(as_vllm) as fake:
        invoke(fake.url, "--tasks", "toy")
        without = json.loads(harness.read_text())
        invoke(fake.url, "--tasks", "toy", "--api-key-env", "OURS")
        with_key = json.loads(harness.read_text())
    asked = without["arguments"]
    assert asked[:3] == ["run", "--model", "local-completions"]
    given = asked[asked.index("--model_args") + 1].split(",")
    assert {f"base_url={fake.url}/v1/completions", "max_length=128"} < set(given)
    assert (without["key"], with_key["key"]) == (None, "ours")


def test_what_cannot_be_written_is_said_before_anything_is_asked(
    samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with running(as_vllm) as fake:
        for options, message in (
            (("--html", tmp_path / "absent" / "page.html"), "there is no directory"),
            (("--html", tmp_path), "is a directory; give the page's own path"),
            (("--out", samples), "is a file; give a directory"),
            (("--tasks", "arc_easy"), "pip install 'octet-llm[evaluate]'"),
        ):
            error = refused(fake.url, "--samples", samples, "--top-k", 5, *options)
            assert isinstance(error, ConfigError) and message in str(error)
        monkeypatch.setattr("os.access", lambda _, mode, **more: mode != os.W_OK)
        error = refused(fake.url, "--samples", samples, "--html", tmp_path / "page.html")
        assert f"{tmp_path} cannot be written to" in str(error)
        assert not fake.asked


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_full_disk_loses_the_page_alone(
    samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    page = tmp_path / "page.html"
    monkeypatch.setattr("os.replace", full)
    with running(as_vllm) as fake:
        done = invoke(fake.url, "--samples", samples, "--top-k", 5, "--html", page, *options)
    assert "perplexity" in done.stdout
    assert (
        str(done.exception) == f"{page}: not written: No space left on device; choose another place"
    )
    assert not list(tmp_path.glob("*page.html*"))


def test_the_help_can_be_read() -> None:
    """`[/model]` is markup, unless it is escaped."""
    done = invoke("--help")
    assert done.exit_code == 0 and "http://host:port[/model]" in " ".join(done.stdout.split())


def test_without_the_harness_its_command_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("lm_eval") is None
    with running(as_vllm) as fake:
        line = str(refused(fake.url, "--tasks", "arc_easy,hellaswag", "--limit", 10))
    assert "pip install 'octet-llm[evaluate]'" in line
    assert "lm_eval run --model local-completions --tasks arc_easy,hellaswag" in line


def less_sure(by: float) -> Any:
    """A server whose tokens are each less likely, by `by` nats and a little that varies."""

    def answering(body: dict[str, Any]) -> tuple[int, Any]:
        status, data = as_vllm(body)
        for position in data["choices"][0]["prompt_logprobs"]:
            for entry in (position or {}).values():
                entry["logprob"] -= by * (1 + 0.5 * (-1) ** len(body["prompt"]))
        return status, data

    return answering


def test_a_gate_takes_the_end_of_the_interval(samples: Path) -> None:
    """A server 1 % worse fails a gate of 1.1 %, though the estimate is within."""
    with running(as_vllm) as one, running(less_sure(0.01)) as other:
        options = (one.url, other.url, "--samples", samples, "--top-k", 5)
        (judged,) = answered(*options, "--gate", "ppl:5%")["gate"]
        assert judged["met"] and judged["estimate"] < 0.011 < judged["upper"] < 0.05
        done = invoke(*options, "--gate", "ppl:1.1%")
        assert done.exception.exit_code == 1 and "not within --gate ppl=1.1%" in str(done.exception)
        assert other.url in str(done.exception) and "perplexity" in done.stdout
        done = invoke(*options, "--gate", "ppl:1.1%", "--json")
        assert not json.loads(done.stdout)["gate"][0]["met"]


def test_a_gate_without_something_to_compare_with_is_refused(samples: Path) -> None:
    with running(as_vllm) as one:
        options = (one.url, "--samples", samples)
        assert "give --reference, or another" in str(refused(*options, "--gate", "ppl:1%"))
        assert "is measured from --reference" in str(refused(*options, "--gate", "kl=0.01"))
        assert "--gate '1%': write kl=0.005" in str(refused(*options, "--gate", "1%"))
        assert "--gate 'ppl:0%': ppl" in str(refused(*options, "--gate", "ppl:0%"))
        assert "give --samples" in str(refused(one.url, "--tasks", "x", "--gate", "ppl:1%"))
        (few,) = answered(*options, one.url, "--count", 1)["rows"][:1]
        assert few["samples"] == 1
        done = invoke(*options, one.url, "--count", 1, "--gate", "ppl:1%")
        assert done.exception.exit_code == 1 and "up to +inf %" in str(done.exception)
