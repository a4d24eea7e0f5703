"""A real vLLM, with the plugin, counts the activations that `octet drift` compares.

The plugin's entry point is in a directory of its own, as Octet is not installed beside vLLM here.
"""

import json
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from calibrate.drift import compare_live
from octet.artifacts.calibration import Calibration
from octet.artifacts.live import read_live
from tests.integration.conftest import EXAMPLE, require
from tests.integration.servers import layout
from tests.integration.servers.launch import ServerFailed, VllmServer, cpu_flags
from tests.layout import ROOT

pytestmark = pytest.mark.vllm

WINDOWS = 12  # `octet drift` wants 8
ENTRY = "[vllm.general_plugins]\noctet_counting = serve.vllm_counting:register\n"


@dataclass(kw_only=True)
class CountingVllm(VllmServer):
    """vLLM with Octet beside it, which counts into `directory`."""

    plugins: Path
    directory: Path
    compiled: bool = False

    def command(self) -> list[str]:
        return [x for x in super().command() if x != "--enforce-eager" or not self.compiled]

    def environment(self) -> dict[str, str]:
        base = super().environment()
        if self.compiled:
            del base["TORCH_COMPILE_DISABLE"]
        paths = [base.get("PYTHONPATH", ""), str(ROOT), str(self.plugins)]
        return base | {
            "PYTHONPATH": ":".join(path for path in paths if path),
            "OCTET_COUNT": str(self.directory),
            "OCTET_COUNT_ONE_STEP_IN": "2",
            "OCTET_COUNT_WINDOW_TOKENS": "128",
        }


@pytest.fixture
def plugins(tmp_path: Path) -> Path:
    info = tmp_path / "plugins" / "octet_llm-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: octet-llm\nVersion: 0\n")
    (info / "entry_points.txt").write_text(ENTRY)
    return info.parent


def texts() -> Iterator[str]:
    for line in (EXAMPLE / "samples" / "heldout.jsonl").read_text("utf-8").splitlines():
        yield json.loads(line)["text"]


def complete(server: VllmServer, prompt: str) -> None:
    body = {"model": server.served_name, "prompt": prompt, "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize("compiled", [False, True])
def test_vllm_counts_every_tensor_of_the_calibration(
    exports: Path, plugins: Path, tmp_path: Path, compiled: bool
) -> None:
    require(layout.VLLM)
    if "avx512f" not in cpu_flags():
        pytest.skip("vLLM's CPU build keeps an FP8 KV cache only with AVX-512: use such a machine")
    live = tmp_path / "live"
    server = CountingVllm(
        model=exports / "checkpoint",
        log=tmp_path / "vllm.log",
        plugins=plugins,
        directory=live,
        compiled=compiled,
    )
    calibration = Calibration.load(exports / "calibration-fp8")
    with server:
        for text in texts():  # chance draws the steps: it takes 30 prompts, or 60
            if len(list(live.glob("*.safetensors"))) >= WINDOWS:
                break
            complete(server, text[:1200])
    windows = read_live(live, calibration)
    spec = calibration.manifest.model.spec
    widths = {linear.input: linear.in_features for linear in spec.linears()}
    for name in calibration.observations:
        width = widths.get(name, spec.kv_heads * spec.head_dim)
        assert [w.counts(name).sum() for w in windows] == [w.tokens * width for w in windows]
    found = compare_live(calibration, windows)
    assert not found.drifted and not found.uncounted


def test_vllm_refuses_to_count_a_checkpoint_of_no_calibration(
    plugins: Path, tmp_path: Path
) -> None:
    require(layout.VLLM)
    server = CountingVllm(
        model=EXAMPLE / "model",
        log=tmp_path / "vllm.log",
        plugins=plugins,
        directory=tmp_path / "live",
        kv_cache_dtype="auto",
    )
    with pytest.raises(ServerFailed), server:
        pass
    assert "not an Octet artifact" in server.log.read_text()  # the engine's error is not the last
