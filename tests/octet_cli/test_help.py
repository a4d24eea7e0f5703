"""Help and errors can be read: by anyone, on any terminal, in any locale, and through a pipe."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from octet_cli import main as cli
from octet_cli.help import EXAMPLES
from tests.command import octet
from tests.layout import ROOT

COMMANDS = [name for name in EXAMPLES if name != "octet"]


def command_of(words: list[str]) -> tuple[Any, Any, list[str]]:
    """The innermost command that `words` name, its context, and the words after its name."""
    command: Any = typer.main.get_command(cli.app)
    context = command.make_context("octet", [], resilient_parsing=True)
    while isinstance(command, TyperGroup) and words:
        found = command.get_command(context, words[0])
        context = found.make_context(words[0], [], parent=context, resilient_parsing=True)
        command, words = found, words[1:]
    return command, context, words


def test_every_command_has_examples() -> None:
    def names(group: Any, *before: str) -> list[str]:
        found = []
        for name, command in group.commands.items():
            found.append(" ".join((*before, name)))
            if isinstance(command, TyperGroup):
                found += names(command, *before, name)
        return found

    assert sorted(names(typer.main.get_command(cli.app))) == sorted(COMMANDS)


@pytest.mark.parametrize("command", EXAMPLES)
def test_examples_are_shown_and_name_options_that_exist(command: str) -> None:
    shown = octet(*("" if command == "octet" else command).split(), "--help").stdout
    for example in EXAMPLES[command]:
        assert " ".join(example.split()) in " ".join(shown.split())
        found, context, words = command_of(shlex.split(re.split(" < | -- ", example)[0])[1:])
        known = {name for p in found.get_params(context) for name in (*p.opts, *p.secondary_opts)}
        assert {word for word in words if word.startswith("-")} <= known, example


@pytest.mark.parametrize("command", COMMANDS)
def test_metavars_have_one_style(command: str) -> None:
    """One word in capitals, the choices, or nothing after a flag."""
    found, context, _ = command_of(command.split())
    for parameter in found.get_params(context):
        metavar = parameter.metavar
        if getattr(parameter, "is_flag", False):
            assert metavar == "", parameter.name
        else:
            styles = r"[A-Z][A-Z|x]*|[a-z0-9_-]+(\|[a-z0-9_-]+)+"
            assert re.fullmatch(styles, metavar), (parameter.name, metavar)


DOWNLOAD = (
    "org/model: no such directory; a model on the Hugging Face Hub has to be downloaded first:"
    " hf download org/model --local-dir model"
)
MISTAKES = {
    "calibrate org/model --samples s -o o": DOWNLOAD,
    "evaluate org/model --samples pyproject.toml": DOWNLOAD,
    "bench org/model http://a --tokenizer t": DOWNLOAD,
    "prewarm org/model": DOWNLOAD,
    "calibrate m --samples s -o o --kv e5m3": (
        "Invalid value for '--kv-cache' / '--kv': 'e5m3' is not one of 'e5m2', 'e4m3', 'float16'."
    ),
    "keys create alice": "no command 'create'; did you mean 'new'?",
    "keys remove alice": "no command 'remove'; known: hash, new",
    "calibrat m": "no command 'calibrat'; did you mean 'calibrate'?",
    "quantize m": "no command 'quantize'; did you mean 'calibrate'?",
    "benchmark m": "no command 'benchmark'; did you mean 'bench'?",
    "export vllm c": "no command 'vllm'; did you mean 'checkpoint'?",
    "calibrate": "Missing argument 'MODEL'.",
    "calibrate m --samples s -o o --contn 3": (
        "No such option: --contn (Possible options: --count, --long, --out)"
    ),
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_answered_in_one_line(words: str) -> None:
    done = octet(*words.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {MISTAKES[words]}\n"


PLACES: dict[str, dict[str, str]] = {
    "40 columns": {"COLUMNS": "40"},
    "no colour": {"NO_COLOR": "1", "FORCE_COLOR": "1"},
    "ASCII": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "Latin-1": {"PYTHONIOENCODING": "latin-1"},
}


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    plain = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")}
    return subprocess.run(
        [sys.executable, "-m", "octet", *words],
        capture_output=True,
        cwd=ROOT,
        env=plain | environment,
    )


@pytest.mark.parametrize("place", PLACES)
def test_help_and_errors_are_whole_wherever_they_are_read(place: str) -> None:
    done = run("calibrate", "--help", **PLACES[place])
    assert done.returncode == 0 and done.stderr == b""
    shown = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout.decode("latin-1"))
    assert "--kv-cache" in shown and "e5m2" in shown and "Examples:" in shown
    if place == "40 columns":
        prose = done.stdout.decode().partition("Options:")[0].splitlines()
        assert max(map(len, prose)) <= 40
    if place == "no colour":
        assert not re.search(rb"\x1b\[[0-9;]*3[0-9]", done.stdout)  # bold may stay
    done = run("calibrate", "modèle/模型", "--samples", "s", "-o", "o", **PLACES[place])
    assert done.returncode == 2 and done.stdout == b""
    (line,) = done.stderr.splitlines()
    reason = b"not ASCII text; set PYTHONUTF8=1" if place == "ASCII" else b"no such directory"
    assert line.startswith(b"error: mod") and reason in line


def test_a_locale_without_utf_8_calibrates_and_a_log_has_a_warning_in_one_line(
    tiny_model: Path, tiny_samples: Path, tmp_path: Path
) -> None:
    options = ["--count", "8", "--allow-few-samples", "--no-predict", "--max-length", "32"]
    command = ["calibrate", str(tiny_model), "--samples", str(tiny_samples), *options]
    done = run(*command, "--out", str(tmp_path / "out"), **PLACES["ASCII"])
    assert done.returncode == 0, done.stderr
    assert b"\nwarning: 8 samples are few: 128 to 512 are usual\n" in done.stderr
    assert any(len(line) > 100 for line in done.stderr.splitlines())
    assert (tmp_path / "out" / "report.html").read_text("utf-8").rstrip().endswith("</html>")


def test_a_pipe_that_closes_early_is_no_error() -> None:
    command = [sys.executable, "-m", "octet", "calibrate", "--help"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.wait()
    assert b"Traceback" not in errors and b"Error" not in errors
    process.stderr.close()


def test_what_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = tmp_path / "s.jsonl"
    samples.write_text('{"text": "x"}\n')

    def denied(path: Path, *_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", denied)  # root may read anything
    done = octet("calibrate", tmp_path, "--samples", samples, "--out", tmp_path / "out")
    assert done.returncode == 2
    assert re.fullmatch(r"error: .*: Permission denied\n", done.stderr)
