"""The start of a command: what it loads before it refuses a mistake, and whose packages it runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from octet import __version__
from octet.artifacts.manifest import Manifest, software, write_artifact
from octet.artifacts.provenance import ModelIdentity
from octet.model.checkpoint import Checkpoint
from octet.recipe import Recipe
from octet_cli import packages
from octet_cli.main import main
from tests.command import octet
from tests.layout import ROOT

HEAVY = (
    "torch transformers numba onnx onnxruntime plotly fastapi aiohttp tokenizers uvicorn tensorrt"
)

# Runs each command in one process, and prints its code, its errors and the libraries loaded so far.
RUN_ALL = f"""
import contextlib, io, json, sys
from octet_cli.main import main
for words in json.load(sys.stdin):
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        try:
            main(words)
        except SystemExit as end:
            code = end.code
    loaded = sorted(set({HEAVY!r}.split()) & sys.modules.keys())
    print(json.dumps([code, errors.getvalue(), loaded]))
"""

ABSENT = "absent: no such directory"
NO_ARTIFACT = "plain: not an Octet artifact (no manifest.json)"
EXISTS = "taken: exists already; add --force to replace it"
NEWER = (
    "newer/manifest.json: schema version 2, written by a newer Octet; this one reads up to 1:"
    " pip install -U octet-llm"
)
REFUSED = {
    "calibrate absent --samples texts.jsonl -o out": "absent: no such directory",
    "calibrate plain --samples texts.jsonl -o out": "plain: not a Hugging Face checkpoint",
    "calibrate torn --samples texts.jsonl -o out": "torn/config.json: ",
    "calibrate model --samples absent -o out": "absent: no such file",
    "calibrate model --samples texts.jsonl -o taken": EXISTS,
    "calibrate model --samples texts.jsonl -o out --recipe fp9": "unknown recipe 'fp9'",
    "calibrate model --samples texts.jsonl -o out --exclude x": "recipe fp8+exclude: exclude: no",
    "calibrate model --samples texts.jsonl -o out --budget kl": "budget 'kl': write kl=0.005",
    "calibrate model --samples texts.jsonl -o out --max-kl x": "--max-kl 'x': 'x' is not a",
    "rescale absent -o out --recipe fp8": ABSENT,
    "rescale newer -o out --recipe fp8": NEWER,
    "rescale calibration -o taken --recipe fp8": EXISTS,
    "rescale calibration -o out --recipe fp8": "calibration: its checkpoint (not recorded) is not",
    "rescale calibration -o out --recipe fp8 --max-kl x": "--max-kl 'x': 'x' is not a positive",
    "rescale calibration -o out": "nothing to change: give --recipe, --kv-cache, --exclude, --his",
    "rescale calibration -o out --histograms absent": "Invalid value for '--histograms': dir 'abs",
    "rescale calibration -o out --te-state absent": "Invalid value for '--te-state': file 'absent'",
    "drift absent --live plain": ABSENT,
    "drift plain --live plain": NO_ARTIFACT,
    "drift newer --live plain": NEWER,
    "drift calibration --live absent": "Invalid value for '--live': dir 'absent' does not exist",
    "drift calibration --live plain --metrics absent/p": "absent/p: there is no directory absent",
    "drift calibration --live plain --false-alarms 0": "Invalid value for '--false-alarms'",
    "verify absent": ABSENT,
    "verify plain": "plain: neither an Octet artifact (no manifest.json) nor a checkpoint",
    "verify newer": NEWER,
    "verify http://127.0.0.1:9 --golden absent": ABSENT,
    "verify http://127.0.0.1:9 --golden newer": NEWER,
    "evaluate absent --samples texts.jsonl": "absent: no such file or directory",
    "evaluate plain --samples absent": "absent: no such file or directory",
    "evaluate plain --samples texts.jsonl": "plain: not a Hugging Face checkpoint",
    "evaluate plain --reference absent --samples texts.jsonl": "absent: no such file or directory",
    "rollout m": "name the canary to roll out, or give --back",
    "rollout m next --back": "name the canary to roll out, or give --back",
    "rollout m next --gateway host:9": "--gateway host:9: should start with http:// or https://",
    "rollout m next --steps a,1": "--steps a,1: write shares such as 0.01,0.1,0.5,1",
    "rollout m next --gateway http://127.0.0.1:9": "http://127.0.0.1:9/admin/",
    "bench http://127.0.0.1:9": "http://127.0.0.1:9: a comparison needs two servers or more",
    "bench plain http://127.0.0.1:9": "plain: neither a server's URL",
    "bench http://127.0.0.1:9 http://127.0.0.1:9": "prompts need the model's tokenizer: give --tok",
    "bench http://127.0.0.1:9 http://127.0.0.1:9 --tokenizer absent": ABSENT,
    "bench http://127.0.0.1:9 http://127.0.0.1:9 --tokenizer plain": "plain: has no tokenizer.json",
    "bench http://127.0.0.1:9 http://127.0.0.1:9 --tokenizer model --samples absent": (
        "absent: no such file or directory"
    ),
    "bench http://127.0.0.1:9 http://127.0.0.1:9 --tokenizer model --load 16": (
        "--load 16: write CONCURRENCYxINPUTxOUTPUT"
    ),
    "bench http://127.0.0.1:9 http://127.0.0.1:9 --tokenizer model --vllm absent": (
        "--vllm absent: no such command"
    ),
    "plan model --gpu h101 --context 8k --concurrency 1": "unknown GPU 'h101': name one, or its",
    "plan model --gpu h100 --context 8k --concurrency 0": "--concurrency 0: give 1 or more",
    "plan model --gpu h100 --context 8kb --concurrency 1": "--context 8kb: write a number of tok",
    "plan model --gpu h100 --context 256 --concurrency 1 --price 0": "--price 0: give dollars per",
    "plan model --gpu h100 --context 256 --concurrency 1 --price -2": "--price -2: give dollars",
    "plan model --gpu h100 --context 256 --concurrency 1 --price nan": "--price nan: give dollars",
    "plan model --gpu h100 --context 256 --concurrency 1 --html absent/p": "--html absent/p: there",
    "plan model --gpu h100 --context 256 --concurrency 1 --bench absent": "absent: No such file or",
    "plan model --gpu h100 --context 64k --concurrency 1": "--context 65536: ",
    "plan model --gpu sm87 --context 256 --concurrency 1": "--gpu compute capability 8.7: its mem",
    "plan model --gpu t4 --context 256 --concurrency 99999": "tiny-model",
    "plan absent --gpu h100 --context 8k --concurrency 1": ABSENT,
    "plan plain --gpu h100 --context 8k --concurrency 1": "plain: not a Hugging Face checkpoint",
    "plan torn --gpu h100 --context 8k --concurrency 1": "torn/config.json: not valid JSON",
    "plan newer --gpu h100 --context 8k --concurrency 1": NEWER,
    "export checkpoint absent -o out": ABSENT,
    "export checkpoint plain -o out": NO_ARTIFACT,
    "export checkpoint newer -o out": NEWER,
    "export checkpoint absent -o taken": EXISTS,
    "export onnx absent -o out": ABSENT,
    "export onnx plain -o out": NO_ARTIFACT,
    "export onnx newer -o out": NEWER,
    "export onnx absent -o taken": EXISTS,
    "export triton absent -o out": ABSENT,
    "export triton plain --all": NO_ARTIFACT,
    "export triton newer -o out": NEWER,
    "export checkpoint calibration -o out --max-kl x": "--max-kl 'x': 'x' is not a positive number",
    "export onnx calibration -o out --max-ppl-change 0": "--max-ppl-change '0': '0' is not a pos",
    "export triton calibration --all --max-kl 1%": "--max-kl '1%' is in nats, such as --max-kl",
    "build-engine calibration -o out --max-kl -1": "--max-kl '-1': '-1' is not a positive number",
    "build-engine absent -o out": ABSENT,
    "build-engine plain -o out": NO_ARTIFACT,
    "build-engine newer -o out": NEWER,
    "build-engine absent -o taken": EXISTS,
    "serve absent": ABSENT,
    "serve plain": NO_ARTIFACT,
    "serve newer": NEWER,
    "serve calibration": "calibration: is a calibration; what is served here is a checkpoint, an",
    "serve model": "model: is not quantized; give --samples FILE to calibrate and prove it",
    "serve model --samples texts.jsonl --recipe fp9": "unknown recipe 'fp9'",
    "serve model other": "other: give one export; options of vLLM go behind --",
    "serve --config absent": "configuration absent: No such file or directory",
    "prove": "prove is for pods: give --kubernetes; for one server: octet verify URL --golden",
    "prove --kubernetes": "which pods? give --selector",
    "prove --kubernetes -l app=vllm": "give --golden, the directory of the export",
    "prove --kubernetes -l app=vllm --golden absent": ABSENT,
    "prove --kubernetes -l app=vllm --golden newer": NEWER,
    "prove --kubernetes -l app=vllm --golden newer --port 70000": "--port 70000: neither a port",
    "prove --kubernetes -l app=vllm --golden newer --condition proven": "--condition proven: write",
    "prove --kubernetes -l app=vllm --golden newer --metrics 9090": "--metrics 9090: write HOST:P",
    "deploy ray absent": "octet deploy ray needs Ray Serve 2.60: pip install 'octet-llm[ray]'",
    "keys new ?": "'?' is not a valid name of a key",
}


@pytest.fixture(scope="module")
def refusals(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[int, str, list[str]]]:
    directory = tmp_path_factory.mktemp("start")
    for name in ("plain", "taken", "newer", "torn"):
        (directory / name).mkdir()
    (directory / "torn" / "config.json").write_text("{")
    (directory / "model").symlink_to(tiny_model)
    (directory / "plain" / "notes.txt").write_text("mine")
    (directory / "taken" / "manifest.json").write_text("{}")
    (directory / "newer" / "manifest.json").write_text('{"schema_version": 2}')
    with write_artifact(directory / "calibration") as writer:
        model = ModelIdentity.of(Checkpoint.open(tiny_model))
        recipe = Recipe.load("fp8")
        writer.finish(Manifest(kind="calibration", model=model, recipe=recipe, software=software()))
    (directory / "texts.jsonl").write_text('{"text": "x = 1"}\n')
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL],
        input=json.dumps([command.split() for command in REFUSED]),
        capture_output=True,
        text=True,
        check=True,
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    return {words: tuple(found) for words, found in zip(REFUSED, results, strict=True)}


@pytest.mark.parametrize("command", REFUSED)
def test_a_mistake_is_refused_before_a_library_is_loaded(
    command: str, refusals: dict[str, tuple[int, str, list[str]]]
) -> None:
    code, errors, loaded = refusals[command]
    assert code == 2 and len(errors.splitlines()) == 1, errors
    assert errors.startswith(f"error: {REFUSED[command]}")
    assert loaded == []


def test_the_version_says_where_each_package_is() -> None:
    done = octet("--version")
    places = [f"{package}: {ROOT / package}" for package in packages.PACKAGES]
    assert done.stdout.splitlines() == [f"octet {__version__}", *places]


def run_beside(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs `octet` with `directory` before Octet's own on the path."""
    path = os.pathsep.join((str(directory), str(ROOT)))
    return subprocess.run(
        [sys.executable, "-m", "octet", *words],
        capture_output=True,
        text=True,
        cwd=directory,
        env=os.environ | {"PYTHONPATH": path},
    )


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A directory with the distribution `waiter`, which has a package `serve`."""
    (tmp_path / "serve").mkdir()
    for name in ("__init__.py", "settings.py"):
        (tmp_path / "serve" / name).touch()
    info = tmp_path / "waiter-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: waiter\nVersion: 1.0\n")
    (info / "top_level.txt").write_text("serve\n")
    return tmp_path


def test_the_version_warns_of_another_distribution_s_package(other: Path) -> None:
    done = run_beside(other, "--version")
    assert done.returncode == 0 and f"serve: {other / 'serve'}" in done.stdout.splitlines()
    (warning,) = done.stderr.splitlines()
    assert warning.startswith(f"warning: serve: {other / 'serve'} is not Octet's")
    assert warning.endswith("; uninstall waiter")


def test_a_command_that_meets_another_s_package_says_so(other: Path) -> None:
    done = run_beside(other, "serve", "absent")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: serve: {other / 'serve'} is not Octet's")


def test_a_folder_that_hides_a_package_is_found(tmp_path: Path) -> None:
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "__init__.py").touch()
    done = run_beside(tmp_path, "--version")
    (warning,) = done.stderr.splitlines()
    assert warning.startswith(f"warning: export: {tmp_path / 'export'} is not Octet's")
    assert warning.endswith("; rename it, or start octet elsewhere")


def test_a_package_that_two_distributions_install_is_found(
    other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(other)
    monkeypatch.setattr(packages, "_HOME", other)
    monkeypatch.setattr(packages, "PACKAGES", ("serve",))
    monkeypatch.delitem(sys.modules, "serve", raising=False)
    (warning,) = packages.find_foreign()
    assert warning.startswith(f"serve: waiter may have overwritten Octet's in {other / 'serve'}")


def test_help_loads_no_numerical_library() -> None:
    code = "import sys, octet_cli.main; print({'numpy', *sys.argv[1:]} & sys.modules.keys())"
    command = [sys.executable, "-c", code, *HEAVY.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "set()\n"


def test_an_error_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["verify", "no-such\x1b]0;owned\x07\x9b31m"])
    line = capsys.readouterr().err.removesuffix("\n")
    assert line.isprintable() and "\\x1b]0;owned" in line
