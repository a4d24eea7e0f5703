"""Inspects a machine: GPUs, drivers, packages, disks, ports and kernel caches, as one document.

`inspect` takes a few seconds and cannot hang: drivers and torch are queried in processes with a
time limit (`inspect_child`). The document can be stored as JSON and judged on another machine.
"""

import errno
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from octet.errors import ConfigError
from octet.hardware import inspect_child
from octet.hardware.cores import usable_cores
from octet.hardware.devices import Device, Vendor, find_device, host_capability
from octet.hardware.fp8_check import Fp8Check, compared

__all__ = [
    "Environment",
    "Folder",
    "Gpu",
    "Machine",
    "Port",
    "inspect",
    "kernel_caches",
    "local_devices",
]

_GPUS_S, _PYTHON_S = 25.0, 90.0  # time limits; torch's first import on a cold disk takes long
_CACHES = {
    "vllm": ("VLLM_CACHE_ROOT", "~/.cache/vllm"),
    "flashinfer": ("FLASHINFER_WORKSPACE_BASE", "~/.cache/flashinfer"),
    "triton": ("TRITON_CACHE_DIR", "~/.triton/cache"),
}


class _Facts(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Gpu(_Facts):
    """A GPU as its driver reports it; memory in bytes, None for what is not reported."""

    index: int
    name: str
    vendor: Vendor = "nvidia"
    capability: str = ""
    memory: int | None = None
    used: int | None = None
    ecc: bool | None = None
    ecc_errors: int | None = None  # uncorrected, since the last boot
    mig: bool = False
    throttled: tuple[str, ...] = ()

    @property
    def device(self) -> Device:
        """Returns its entry in the table; if there is none, its capability without figures."""
        try:
            found = find_device(self.name)
        except ConfigError:
            found = None
        if found is not None and self.capability in ("", found.capability):
            return found
        if not self.capability:
            return Device(self.name, self.vendor, "0.0", self.memory)
        return Device(self.name, self.vendor, self.capability, self.memory)


class Environment(_Facts):
    """A Python environment: its packages, and torch's FP8 on this machine."""

    executable: str
    python: str = ""
    packages: dict[str, str] = {}
    nvrtc: str | None = None
    torch_cuda: str | None = None  # CUDA version that torch was built for
    torch_device: str | None = None  # device of the FP8 checks: cuda or cpu
    torch_problem: str = ""
    checks: tuple[Fp8Check, ...] = ()
    problem: str = ""  # why it could not be inspected

    def version(self, *names: str) -> str | None:
        """Returns the version of the first of the packages that is installed."""
        return next((self.packages[name] for name in names if name in self.packages), None)


class Folder(_Facts):
    """A directory that is written to, and the space on its disk, in bytes."""

    purpose: str
    path: str
    free: int | None = None
    size: int = 0  # of what is in it
    writable: bool = True


class Port(_Facts):
    """A port that a server would listen on."""

    number: int
    problem: str = ""  # empty: it is free


class Machine(_Facts):
    """A machine, as `octet doctor --json` prints it and `octet doctor --recorded` reads it."""

    schema_version: Literal[1] = 1
    cpu: str = ""
    cpu_capability: str = "cpu"
    cores: int = 1
    memory: int | None = None  # bytes
    driver: str | None = None
    cuda: str | None = None  # newest CUDA version that the driver supports
    gpus: tuple[Gpu, ...] = ()
    gpu_problem: str = ""
    environment: Environment
    folders: tuple[Folder, ...] = ()
    ports: tuple[Port, ...] = ()

    @property
    def devices(self) -> tuple[Device, ...]:
        """The kinds of GPUs, each once; the CPU if there is none."""
        if not self.gpus:
            return (find_device(self.cpu_capability),)
        return tuple(dict.fromkeys(gpu.device for gpu in self.gpus))

    @classmethod
    def load(cls, path: Path) -> "Machine":
        """Loads a recorded machine; ConfigError if the file is none."""
        try:
            data = json.loads(path.read_text("utf-8"))
            return cls.model_validate(data.get("machine", data))
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None
        except (ValueError, AttributeError, ValidationError) as error:
            first = str(error).splitlines()[0]
            raise ConfigError(
                f"{path}: not a recorded machine ({first}); give what octet doctor --json printed"
            ) from None


def inspect(*, python: Path | None = None, ports: Sequence[int] = (8000,)) -> Machine:
    """Inspects this machine, the environment of `python` (default: this one) and `ports`.

    Raises ConfigError if `python` is no program.
    """
    executable = sys.executable if python is None else shutil.which(str(python))
    if executable is None:
        raise ConfigError(f"--python {python}: no such program; name the Python that has vLLM")
    with ThreadPoolExecutor(2) as pool:
        asked = pool.submit(_child, sys.executable, "gpus", _GPUS_S)
        other = pool.submit(_child, executable, "python", _PYTHON_S)
        gpus, environment = asked.result(), other.result()
    model, flags = _cpu()
    return Machine(
        cpu=model,
        cpu_capability=host_capability(flags),
        cores=usable_cores(),
        memory=_memory(),
        driver=gpus.get("driver"),
        cuda=gpus.get("cuda"),
        gpus=tuple(Gpu.model_validate(gpu) for gpu in gpus.get("gpus", ())),
        gpu_problem=gpus.get("problem", ""),
        environment=_environment(executable, environment),
        folders=tuple(_folder(f"{name} kernels", path) for name, path in kernel_caches().items()),
        ports=tuple(Port(number=port, problem=_port_problem(port)) for port in ports),
    )


def local_devices() -> tuple[Device, ...]:
    """Returns the kinds of GPUs of this machine, each once; its CPU if it has none."""
    gpus = [
        Gpu.model_validate(gpu) for gpu in _child(sys.executable, "gpus", _GPUS_S).get("gpus", ())
    ]
    if not gpus:
        return (find_device(host_capability(_cpu()[1])),)
    return tuple(dict.fromkeys(gpu.device for gpu in gpus))


def kernel_caches() -> dict[str, Path]:
    """Returns the directories where vLLM, FlashInfer and Triton keep compiled kernels."""
    found = {}
    for name, (variable, default) in _CACHES.items():
        chosen = os.environ.get(variable)
        path = Path(chosen or default).expanduser()
        found[name] = path / ".cache" / "flashinfer" if chosen and name == "flashinfer" else path
    return found


def _child(python: str, mode: str, seconds: float) -> dict[str, Any]:
    """Runs `inspect_child` and returns what it printed, or its problem."""
    with TemporaryFile() as out, TemporaryFile() as err:
        try:
            process = subprocess.Popen(
                [python, inspect_child.__file__, mode],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            with suppress(OSError, subprocess.TimeoutExpired):
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(1.0)  # no longer: a driver may hold it
            return {"problem": f"no answer within {seconds:g} s: the driver or torch hangs"}
        except OSError as error:
            return {"problem": f"cannot be run: {error.strerror}"}
        out.seek(0)
        err.seek(0)
        lines = out.read().decode("utf-8", "replace").splitlines()
        said = err.read().decode("utf-8", "replace").strip()
    try:
        found: dict[str, Any] = json.loads(lines[-1])
    except (ValueError, IndexError):
        last = said.splitlines()[-1] if said else "it printed nothing"
        return {"problem": f"it does not run Octet's inspection: {last[:300]}"}
    return found


def _environment(executable: str, found: dict[str, Any]) -> Environment:
    facts = {name: value for name, value in found.items() if name not in ("matmul", "cache")}
    return Environment.model_validate(
        {"executable": executable, "checks": compared(found), **facts}
    )


def _cpu() -> tuple[str, str]:
    """Returns the CPU's name and its flags."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine(), ""
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    found = {key.strip(): value.strip() for key, value in fields.items()}
    return found.get("model name", platform.machine()), found.get("flags", "")


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _folder(purpose: str, path: Path) -> Folder:
    """Returns the space at `path`, or at its nearest parent that exists."""
    there = next((each for each in (path, *path.parents) if each.exists()), Path("/"))
    try:
        free: int | None = shutil.disk_usage(there).free
    except OSError:
        free = None
    writable = os.access(there, os.W_OK) and there.is_dir()
    return Folder(purpose=purpose, path=str(path), free=free, size=_size(path), writable=writable)


def _size(path: Path) -> int:
    """Returns the bytes of all files in `path`."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except OSError:
                continue
    return total


def _port_problem(port: int) -> str:
    """Returns why a server could not listen on `port`; empty if it could."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            return "in use" if error.errno == errno.EADDRINUSE else str(error.strerror)
    return ""
