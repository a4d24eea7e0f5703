"""Hostile checkpoints and artifacts end in one clear line, soon, in little memory, without a trace.

`checkpoints.py` is the table. Each is given to the readers and to the commands that open it.
"""

import ast
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from calibrate.samples.tokens import load_tokenizer
from octet.artifacts.calibration import Calibration
from octet.errors import OctetError
from octet.model.checkpoint import Checkpoint
from octet.proof.reference import load_proofs
from serve.engine.tokenizer import Tokenizer
from tests.command import octet
from tests.hostile.checkpoints import (
    ARTIFACTS,
    CHECKPOINTS,
    DEEP,
    QUANTIZED,
    Change,
    config,
    link,
    replaced,
    sparse,
    write_calibration,
    write_checkpoint,
    written,
)
from tests.layout import FILES, ROOT
from verify.reader.checkpoint import Written

# Seconds of CPU time: several times what they take on a quiet core (1.2 for a million keys), since
# a core that others share took 2.2 for the same.
READING, COMMAND = 5.0, 6.0
MEMORY = 1 << 30  # of address space, beyond what the process has


@contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """Limits what happens in it: exceeding memory raises MemoryError, exceeding time fails."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, hard))
    began = time.process_time()
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))
    assert time.process_time() - began < seconds


def require_line(text: str, where: Path) -> None:
    """Asserts that an error is one line that a terminal may show, and names a path."""
    assert text.isprintable() and len(text) <= 4500, text
    assert str(where) in text


def altered(original: Path, path: Path, change: Change) -> Path:
    shutil.copytree(original, path)
    change(path)
    return path


def refuses(read: Callable[[Path], object], path: Path, found: str) -> None:
    """Asserts that `read` refuses `path` soon, in one line that matches `found`."""
    with bounded(READING), pytest.raises(OctetError) as caught:
        read(path)
    require_line(str(caught.value), path)
    assert re.search(found, str(caught.value)), caught.value


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("good") / "model"
    write_checkpoint(path)
    Checkpoint.open(path)
    # Imports what the commands need, which takes seconds.
    assert "right so far: names, scales and files" in octet("verify", path).stdout
    octet("calibrate", path, "--samples", path / "nothing", "--out", path / "out")
    return path


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_hostile_checkpoint_is_refused_in_one_line(
    name: str, good: Path, tmp_path: Path, tiny_samples: Path
) -> None:
    change, found = CHECKPOINTS[name]
    path = altered(good, tmp_path / "model", change)
    refuses(Checkpoint.open, path, found)
    with bounded(READING):  # a reader of its own, which may take what quantizers write
        try:
            Written.open(path)
        except OctetError as error:
            require_line(str(error), path)
    if any(file.is_file() and file.stat().st_blocks * 512 > 1 << 20 for file in path.glob("*.*s*")):
        return  # seconds of the same
    for command in (
        ("verify", path, "--no-tokens"),
        ("calibrate", path, "--samples", tiny_samples, "--out", tmp_path / "out"),
    ):
        with bounded(COMMAND):
            ended = octet(*command)
        assert ended.returncode in (1, 2), ended
        assert "Traceback" not in ended.stderr + ended.stdout
        if ended.stderr:  # otherwise, what is wrong is in the table of `octet verify`
            assert ended.stderr.count("\n") == 1 and ended.stderr.startswith("error: ")
            require_line(ended.stderr[:-1], path)
    assert not (tmp_path / "out").exists() and {*tmp_path.iterdir()} == {path}


@pytest.fixture(scope="module")
def calibration(good: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calibration") / "calibration"
    write_calibration(path, good)
    assert octet("export", "checkpoint", path, "--out", path.parent / "out").returncode == 0
    octet("verify", path)
    return path


@pytest.mark.parametrize("name", ARTIFACTS)
def test_a_hostile_artifact_is_refused_in_one_line(
    name: str, calibration: Path, tmp_path: Path
) -> None:
    change, found = ARTIFACTS[name]
    path = altered(calibration, tmp_path / "calibration", change)
    lines = []
    for read in (read_calibration, load_proofs):  # the second is the gateway's
        with bounded(READING):
            try:
                read(path)
            except OctetError as error:
                require_line(str(error), path)
                lines.append(str(error))
    for command in (
        ("verify", path, "--no-tokens"),
        ("export", "checkpoint", path, "--out", tmp_path / "out"),
    ):
        with bounded(COMMAND):
            ended = octet(*command)
        assert "Traceback" not in ended.stderr + ended.stdout
        assert all(character.isprintable() for character in ended.stderr.replace("\n", ""))
        lines += [ended.stderr, ended.stdout]
        if ended.returncode:
            assert ended.stderr.count("\n") <= 1, ended  # `octet verify` may print its table only
            assert {*tmp_path.iterdir()} == {path}
    assert any(re.search(found, line) for line in lines), lines


def read_calibration(path: Path) -> None:
    opened = Calibration.load(path)
    opened.golden  # noqa: B018
    len(opened.histograms)


def test_every_load_by_transformers_refuses_remote_code() -> None:
    loads = []
    for path in (*FILES.values(), *ROOT.glob("benchmarks/*.py"), *ROOT.glob("examples/**/*.py")):
        for call in (x for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, ast.Call)):
            name = ast.unparse(call.func)
            if re.search(r"(Auto|PreTrained)\w+\.from_(pretrained|config)$", name):
                given = {x.arg: ast.unparse(x.value) for x in call.keywords}
                assert given.get("trust_remote_code") == "False", f"{path}: {name}"
                loads.append(name)
    assert len(loads) >= 10


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "OtherForCausalLM"])
def test_code_in_a_checkpoint_does_not_run_nor_does_anything_ask(
    architecture: str,
    good: Path,
    tmp_path: Path,
    tiny_samples: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = Path(shutil.copytree(good, tmp_path / "model"))
    (path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    classes = {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}
    config(
        architectures=[architecture],
        model_type="llama" if architecture == "LlamaForCausalLM" else "other",
        auto_map=classes,
    )(path)
    tokenizer = {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["code.T", "code.T"]}}
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text="": asked.append(text) or "y")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    octet("calibrate", path, "--samples", tiny_samples, "--out", tmp_path / "out")
    with suppress(OctetError):
        load_tokenizer(Checkpoint.open(path))
    assert not asked and not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_hostile_quantization_is_refused_in_one_line(
    name: str, good: Path, tmp_path: Path
) -> None:
    change, found = QUANTIZED[name]
    path = altered(good, tmp_path / "model", change)
    refuses(Written.open, path, found)
    with bounded(COMMAND):
        ended = octet("verify", path, "--no-tokens")
    assert ended.returncode in (1, 2) and "Traceback" not in ended.stderr + ended.stdout


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (replaced("tokenizer.json", os.mkfifo), "tokenizer.json: a FIFO or a device"),
        (link("tokenizer.json", "/dev/zero"), "tokenizer.json: a FIFO or a device"),
        (sparse("tokenizer.json"), "tokenizer.json: larger than the 256 MiB"),
        (written("tokenizer.json", DEEP), "tokenizer.json: not a usable tokenizer"),
        (written("tokenizer_config.json", DEEP), "tokenizer_config.json: .*nested too deeply"),
        (written("tokenizer_config.json", "[1]"), "tokenizer_config.json: expected a JSON object"),
        (written("tokenizer_config.json", '{"chat_template": 5}'), "chat_template is no text"),
        (replaced("chat_template.jinja", os.mkfifo), "chat_template.jinja: a FIFO or a device"),
        (sparse("chat_template.jinja"), "chat_template.jinja: larger than the 1 MiB"),
    ],
)
def test_the_gateway_refuses_a_hostile_tokenizer_in_one_line(
    change: Change, found: str, good: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(good, tmp_path / "model"))
    change(path)
    with bounded(READING), pytest.raises(OctetError) as caught:
        Tokenizer.load(path)
    require_line(str(caught.value), path)
    assert re.search(found, str(caught.value)), caught.value


def test_a_command_of_its_own_ends_in_little_time_and_memory(good: Path, tmp_path: Path) -> None:
    """Holds a process that starts to what it may take, imports included."""
    path = Path(shutil.copytree(good, tmp_path / "model"))
    for name in ("10^8 experts", "weights as a FIFO", "config of a terabyte"):
        shutil.rmtree(path)
        CHECKPOINTS[name][0](Path(shutil.copytree(good, path)))
        ended = subprocess.run(
            [sys.executable, "-m", "octet", "verify", path, "--no-tokens"],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=ROOT,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30)),
        )
        assert ended.returncode in (1, 2) and str(path) in ended.stderr + ended.stdout, ended
        assert ended.stderr.count("\n") <= 1 and "Traceback" not in ended.stdout, ended
