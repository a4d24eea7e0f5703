"""The changes that let the GPU profile run without a GPU, and those that let it be broken.

vLLM is its CPU build, mounted from where `make integration` keeps it; its flags are the file's, but
for two that only a GPU has. The gateway, Triton and Prometheus run as the file says.
"""

import hashlib
import platform
from pathlib import Path
from typing import Any

import yaml

from tests.compose.prepare import ROOT
from tests.compose.project import Change
from tests.integration.servers import layout
from tests.integration.servers.launch import VllmServer

__all__ = ["KEY", "VARIABLES", "breakable", "small_disks", "without_gpu"]

KEY = "octet-of-the-compose-tests"
VARIABLES = {"OCTET_KEY_SHA256": hashlib.sha256(KEY.encode()).hexdigest()}
ONLY_ON_GPUS = ("--attention-backend=", "--gpu-memory-utilization=")
CLOCK = "/tmp/clock"  # in the gateway's container; absent: its clock is right
FAKETIME = f"/usr/lib/{platform.machine()}-linux-gnu/faketime/libfaketime.so.1"
DISK_MB = 32


def without_gpu(content: dict[str, Any]) -> None:
    for name in ("vllm", "triton"):
        del content["services"][name]["deploy"]
    vllm = content["services"]["vllm"]
    kept = [flag for flag in vllm["command"] if not flag.startswith(ONLY_ON_GPUS)]
    vllm["command"] = [*kept, "--max-model-len=1024", "--enforce-eager"]
    server = VllmServer(model=Path("/models/checkpoint"), log=Path("unused"))
    unwritable = {"VLLM_CACHE_ROOT", "VLLM_HOST_IP"}
    environment = {k: v for k, v in server.environment().items() if k not in unwritable}
    vllm["environment"] |= environment
    vllm["volumes"] += [mount(path) for path in (layout.VLLM.resolve(), interpreter())]


def interpreter() -> Path:
    """The installation of Python that vLLM's environment was made of."""
    lines = (layout.VLLM / "pyvenv.cfg").read_text().splitlines()
    settings = dict(line.split(" = ", 1) for line in lines)
    return Path(settings["home"]).parent


def mount(path: Path, target: str | None = None) -> dict[str, Any]:
    return {"type": "bind", "source": str(path), "target": target or str(path), "read_only": True}


def breakable(directory: Path) -> Change:
    """Adds what a fault needs: a clock that can be set, and quotas on a disk that can be filled."""
    config = yaml.safe_load((ROOT / "deploy" / "gateway-gpu.yaml").read_text())
    config["access"]["usage_file"] = "/state/usage.json"
    config["access"]["keys"][0]["tokens_per_day"] = 10**9  # counted, and never reached
    file = directory / "gateway.yaml"
    file.write_text(yaml.safe_dump(config))

    def change(content: dict[str, Any]) -> None:
        gateway = content["services"]["gateway-gpu"]
        gateway["environment"] |= {
            "LD_PRELOAD": FAKETIME,
            "FAKETIME_TIMESTAMP_FILE": CLOCK,
            "FAKETIME_CACHE_DURATION": "1",
            "DONT_FAKE_MONOTONIC": "1",
        }
        others = [v for v in gateway["volumes"] if v["target"] != "/etc/octet/gateway.yaml"]
        gateway["volumes"] = [
            *others,
            mount(file, "/etc/octet/gateway.yaml"),
            "gateway-state:/state",
        ]
        content["volumes"]["gateway-state"] = None

    return change


def small_disks(content: dict[str, Any]) -> None:
    """Puts the volumes of the gateway and of Prometheus into a small tmpfs each."""
    for volume, uid in (("gateway-state", 10001), ("prometheus-data", 65534)):
        options = {"type": "tmpfs", "device": "tmpfs", "o": f"size={DISK_MB}m,uid={uid}"}
        content["volumes"][volume] = {"driver": "local", "driver_opts": options}
