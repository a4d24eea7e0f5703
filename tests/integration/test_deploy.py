"""The servers' flags in docker-compose.yml, read by the real vLLM and the real Triton; and alert
rules that the real Prometheus evaluates.

Their images are not to be had here: vLLM is 0.32's CPU build, where the image has 0.24, and Triton
is pytriton's 2.51. Each server gets one flag more, which none has, and complains of that one alone.
"""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.integration.conftest import require
from tests.integration.servers import layout
from tests.integration.servers.launch import TritonServer, VllmServer
from tests.integration.servers.process import Server

COMPOSE = yaml.safe_load((layout.REPOSITORY / "docker-compose.yml").read_text())
DEFAULTS = {
    "${VLLM_GPU_MEMORY:-0.8}": "0.8",
    "${TRITON_MODEL:-python-lm}": "python-lm",
}


def flags(service: str) -> list[str]:
    words = [word for word in COMPOSE["services"][service]["command"] if word.startswith("--")]
    for variable, value in DEFAULTS.items():
        words = [word.replace(variable, value) for word in words]
    assert not any("$" in word for word in words)
    return words


def complaint(server: Server, command: list[str]) -> str:
    done = subprocess.run(
        [*command, "--no-such-flag"],
        env=server.environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    return done.stdout + done.stderr


@pytest.mark.vllm
def test_vllm_takes_the_flags(tmp_path: Path) -> None:
    require(layout.VLLM)
    server = VllmServer(model=tmp_path, log=tmp_path / "log")
    python, *_ = server.command()
    entrypoint = COMPOSE["services"]["vllm"]["entrypoint"]
    said = complaint(server, [python, "-P", *entrypoint[1:], *flags("vllm")])
    assert "unrecognized arguments: --no-such-flag\n" in said


@pytest.mark.triton
def test_triton_takes_the_flags(tmp_path: Path) -> None:
    require(layout.TRITON)
    server = TritonServer(model_repository=tmp_path, log=tmp_path / "log")
    binary, *_ = server.command()
    said = complaint(server, [binary, *flags("triton")])
    unknown = [line for line in said.splitlines() if "unrecognized option" in line]
    assert len(unknown) == 1
    assert "no-such-flag" in unknown[0]


ALERTS_TEST = """
rule_files: [RULES]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {series: 'octet_captured_requests_total{model="disk full", outcome="kept"}', values: '0x600'}
      - {series: 'octet_captured_requests_total{model="disk full", outcome="failed"}', values: '0x60 1+1x540'}
      - {series: 'octet_captured_requests_total{model="images", outcome="kept"}', values: '0x600'}
      - {series: 'octet_captured_requests_total{model="images", outcome="unsupported"}', values: '0+1x600'}
      - {series: 'octet_captured_requests_total{model="works", outcome="kept"}', values: '0+1x600'}
      - {series: 'octet_captured_requests_total{model="works", outcome="failed"}', values: '0x600'}
      - {series: 'octet_captured_requests_total{model="idle", outcome="kept"}', values: '0x600'}
    promql_expr_test:
      - expr: count by (alertname, model) (ALERTS)
        eval_time: 65m
        exp_samples:
          - {labels: '{alertname="OctetCaptureFails", model="disk full"}', value: 1}
          - {labels: '{alertname="OctetCaptureKeepsNothing", model="images"}', value: 1}
      - expr: count by (alertname, model) (ALERTS)
        eval_time: 500m
        exp_samples:
          - {labels: '{alertname="OctetCaptureFails", model="disk full"}', value: 1}
          - {labels: '{alertname="OctetCaptureKeepsNothing", model="disk full"}', value: 1}
          - {labels: '{alertname="OctetCaptureKeepsNothing", model="images"}', value: 1}
"""  # noqa: E501


def test_alerts_of_a_capture_fire(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool on this machine: apt-get install prometheus")
    path = tmp_path / "alerts.yml"
    path.write_text(ALERTS_TEST.replace("RULES", str(layout.REPOSITORY / "deploy/alerts.yml")))
    done = subprocess.run([promtool, "test", "rules", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
