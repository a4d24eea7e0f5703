"""Tests the inspection of a machine: this one, drivers that hang or lie, and FP8 that is wrong."""

import json
import os
import socket
import stat
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from octet.errors import ConfigError
from octet.hardware import inspect_child, machine
from octet.hardware.fp8_check import compared
from octet.hardware.machine import Gpu, Machine, inspect, kernel_caches


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_this_machine() -> None:
    found = inspect(ports=())
    assert found.environment.executable == sys.executable
    assert found.environment.version("torch") is not None
    assert [check.name for check in found.environment.checks] == [
        "FP8 matmul",
        "E4M3 cache round trip",
        "E5M2 cache round trip",
    ]
    assert all(check.compared and not check.different for check in found.environment.checks)
    assert Machine.model_validate_json(found.model_dump_json()) == found
    assert len(found.model_dump_json()) < 8_000


def test_a_python_that_hangs_fails_or_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_PYTHON_S", 0.5)
    hangs = program(tmp_path / "hangs", "#!/bin/sh\nsleep 60 & wait\n")
    started = time.monotonic()
    assert "no answer within 0.5 s" in inspect(python=hangs, ports=()).environment.problem
    assert time.monotonic() - started < 20
    monkeypatch.setattr(machine, "_PYTHON_S", 30.0)
    fails = program(tmp_path / "fails", "#!/bin/sh\necho 'no module named json' >&2; exit 1\n")
    assert "no module named json" in inspect(python=fails, ports=()).environment.problem
    with pytest.raises(ConfigError, match=r"--python .*none: no such program"):
        inspect(python=tmp_path / "none")


def test_a_port_in_use_and_kernels_on_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_child", lambda *_: {})
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "deep" / "vllm"))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    (tmp_path / ".cache" / "flashinfer").mkdir(parents=True)
    (tmp_path / ".cache" / "flashinfer" / "kernel.so").write_bytes(b"x" * 1000)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        found = inspect(ports=(listener.getsockname()[1],))
    assert found.ports[0].problem == "in use"
    sizes = {folder.purpose: folder.size for folder in found.folders}
    assert sizes["flashinfer kernels"] == 1000 and sizes["vllm kernels"] == 0
    assert found.folders[0].free and kernel_caches()["vllm"] == tmp_path / "deep" / "vllm"


SMI = """#!/bin/sh
case "$1" in
  *compute_cap*) {first} ;;
  --query*) echo '0, Tesla T4, 15360, 300, 470.82.01, Enabled, 0, [N/A], 0x0000000000000020' ;;
  *) echo '| NVIDIA-SMI 470.82.01  Driver Version: 470.82.01  CUDA Version: 11.4 |' ;;
esac
"""


@pytest.mark.parametrize(
    ("first", "capability", "memory"),
    [
        (
            "echo '0, Tesla T4, 7.5, 15360, 300, 470.82.01, Enabled, 0, [N/A], 0x0000000000000020'",
            "7.5",
            15360,
        ),
        ("echo 'Field \"compute_cap\" is not a valid field to query.'; exit 2", "", 15360),
    ],
)
def test_nvidia_smi_is_read_also_of_an_old_driver(
    first: str, capability: str, memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "nvidia-smi", SMI.format(first=first))
    monkeypatch.setenv("PATH", str(tmp_path) + os.pathsep + os.environ["PATH"])
    found = inspect_child.from_nvidia_smi()
    assert (found["driver"], found["cuda"]) == ("470.82.01", "11.4")
    gpu = Gpu.model_validate(found["gpus"][0])
    assert (gpu.capability, gpu.memory) == (capability, memory * 2**20)
    assert gpu.ecc and gpu.throttled == ("heat (software)",) and not gpu.mig
    assert gpu.device.name == "T4" and gpu.device.capability == "7.5"


def test_a_driver_that_fails_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "nvidia-smi", "#!/bin/sh\necho 'No devices were found'; exit 6\n")
    monkeypatch.setenv("PATH", str(tmp_path) + os.pathsep + os.environ["PATH"])
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert inspect_child.gpus() == {"gpus": [], "problem": "nvidia_smi: No devices were found"}


def test_nvml_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception):
        pass

    def lacks(_handle: Any) -> None:
        raise NVMLError

    nvml = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlSystemGetDriverVersion=lambda: b"580.159.03",
        nvmlSystemGetCudaDriverVersion_v2=lambda: 13000,
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetName=lambda _: "NVIDIA H100 80GB HBM3",
        nvmlDeviceGetCudaComputeCapability=lambda _: (9, 0),
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(total=81559 * 2**20, used=2**20),
        nvmlDeviceGetEccMode=lambda _: [1, 1],
        nvmlDeviceGetTotalEccErrors=lambda *_: 0,
        nvmlDeviceGetMigMode=lacks,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda _: 0x88,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    found = inspect_child.gpus()
    (gpu,) = (Gpu.model_validate(gpu) for gpu in found["gpus"])
    assert (gpu.index, gpu.device.name, found["cuda"]) == (1, "H100", "13.0")
    assert gpu.throttled == ("hardware slowdown", "power brake") and gpu.ecc and not gpu.mig


def test_amds_driver_is_read(tmp_path: Path) -> None:
    for number, target in ((0, 0), (1, 90402), (2, 90500)):
        node = tmp_path / str(number)
        (node / "mem_banks" / "0").mkdir(parents=True)
        (node / "properties").write_text(f"simd_count 1\ngfx_target_version {target}\n")
        (node / "name").write_text("\n")
        (node / "mem_banks" / "0" / "properties").write_text(
            "heap_type 1\nsize_in_bytes 206141652992\n"
        )
    gpus = inspect_child.from_kfd(tmp_path)["gpus"]
    assert [gpu["capability"] for gpu in gpus] == ["gfx942", "gfx950"]
    assert Gpu.model_validate(gpus[0]).device.vendor == "amd"


def test_wrong_fp8_is_noticed() -> None:
    import torch

    right = inspect_child.with_torch()
    assert all(not check.different for check in compared(right))
    wrong = json.loads(json.dumps(right))
    wrong["matmul"]["values"][7] *= 1.05
    codes = np.frombuffer(bytes.fromhex(wrong["cache"]["e5m2"]["codes"]), np.uint8)
    wrong["cache"]["e5m2"]["codes"] = np.where(codes > 3, codes - 1, codes).tobytes().hex()
    wrong["cache"]["e4m3"] = {"problem": "not implemented"}
    matmul, e4m3, e5m2 = compared(wrong)
    assert matmul.different == 1 and e4m3.problem == "not implemented"
    assert e5m2.different > 10_000
    # bytes of E4M3 under an E5M2 label, as vLLM's Triton writer makes them
    mislabelled = inspect_child.cache(torch, "cpu", "e4m3")
    wrong["cache"]["e5m2"] = mislabelled
    assert compared(wrong)[2].problem.startswith("34754 values for 36546")
