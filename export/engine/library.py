"""Chooses between TensorRT and TensorRT-RTX, and names the package to install if neither is there.

TensorRT (NVIDIA's index, container images) builds for this machine's GPU. TensorRT-RTX (PyPI)
builds for named GPUs and needs none itself. Their Python APIs are the same except for the targets.

The NVIDIA GPU is found through its driver, so no CUDA library has to be installed.
"""

import ctypes
import importlib
import importlib.util
import platform
import re
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from octet.errors import UnsupportedError

__all__ = [
    "RTX",
    "RTX_TARGETS",
    "TENSORRT",
    "BuilderChoice",
    "Gpu",
    "Name",
    "choose",
    "find_gpu",
    "load",
]

_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CUdevice_attribute


@dataclass(frozen=True)
class Gpu:
    """The first GPU that this process sees."""

    name: str  # such as "NVIDIA H200"
    target: str  # such as "sm90"


def find_gpu() -> Gpu | None:
    """Returns the first GPU; None without a driver or a GPU that it shows to this process."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(256)
    by = ctypes.byref
    calls: tuple[tuple[Any, ...], ...] = (
        (driver.cuInit, 0),
        (driver.cuDeviceGet, by(device), 0),
        (driver.cuDeviceGetName, name, len(name), device),
        (driver.cuDeviceGetAttribute, by(major), _CAPABILITY_MAJOR, device),
        (driver.cuDeviceGetAttribute, by(minor), _CAPABILITY_MINOR, device),
    )
    if any(call(*arguments) != 0 for call, *arguments in calls):
        return None
    return Gpu(name.value.decode(), f"sm{major.value}{minor.value}")


BuilderChoice = Literal["auto", "tensorrt", "tensorrt-rtx"]
Name = Literal["TensorRT", "TensorRT-RTX"]
TENSORRT: Name = "TensorRT"
RTX: Name = "TensorRT-RTX"

_MODULES: dict[Name, tuple[str, ...]] = {
    TENSORRT: ("tensorrt", "tensorrt_bindings"),
    RTX: ("tensorrt_rtx", "tensorrt_rtx_bindings"),
}
_OLDEST = {TENSORRT: (10, 13), RTX: (1, 7)}
_INSTALL: dict[Name, str] = {
    TENSORRT: "pip install 'octet-llm[tensorrt]' --extra-index-url https://pypi.nvidia.com",
    RTX: "pip install 'octet-llm[tensorrt-rtx]'",
}
_SYSTEMS = ("Linux", "Windows")  # both builders run on these
RTX_TARGETS = ("sm75", "sm80", "sm86", "sm89", "sm120", "sm121")  # GPUs that TensorRT-RTX supports


def choose(choice: BuilderChoice, gpu: Gpu | None, *, targets: bool) -> Name:
    """Returns the builder for `choice` and this machine's GPU; `targets` if the user named any.

    "auto" is TensorRT if it is installed and there is a GPU, or if only it supports that GPU.
    Raises UnsupportedError for "tensorrt" without a GPU.
    """
    if choice == "tensorrt-rtx":
        return RTX
    if choice == "tensorrt":
        if gpu is None:
            raise UnsupportedError(
                "--builder tensorrt: it builds on the GPU that will run the engine, and there is"
                " none here; --builder tensorrt-rtx builds without one"
            )
        return TENSORRT
    if gpu is None:
        return RTX
    alone = gpu.target not in RTX_TARGETS and not targets
    return TENSORRT if alone or _installed(TENSORRT) else RTX


def load(name: Name, gpu: Gpu | None, *, auto: bool = False) -> ModuleType:
    """Imports the builder. Raises UnsupportedError if it is missing, too old or cannot be loaded.

    If it is missing, the message has the command that installs it on this machine. `auto` means
    that the user did not choose this builder.
    """
    for module in _MODULES[name]:
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError:
            continue
        except (ImportError, OSError) as error:
            why = " ".join(str(error).split())
            raise UnsupportedError(f"{name} is installed but cannot be loaded: {why}") from None
        if _version(found) < _OLDEST[name]:
            oldest = ".".join(str(part) for part in _OLDEST[name])
            raise UnsupportedError(
                f"{name} {found.__version__} is older than {oldest}: {_INSTALL[name]} --upgrade"
            )
        return found
    raise UnsupportedError(_missing(name, gpu, auto))


def _missing(name: Name, gpu: Gpu | None, auto: bool) -> str:
    system = platform.system()
    if system not in _SYSTEMS:
        return f"{name} is made for {' and '.join(_SYSTEMS)}, not for {system}: build there"
    if not auto:
        return f"{name} is not installed: {_INSTALL[name]}"
    if gpu is None:
        return f"no TensorRT is installed; without a GPU, as here: {_INSTALL[RTX]}"
    if gpu.target not in RTX_TARGETS:
        return f"no TensorRT is installed; for {gpu.name} ({gpu.target}): {_INSTALL[TENSORRT]}"
    return f"no TensorRT is installed; for {gpu.name} ({gpu.target}): {_INSTALL[RTX]}"


def _installed(name: Name) -> bool:
    for module in _MODULES[name]:
        try:
            if importlib.util.find_spec(module) is not None:
                return True
        except ValueError:  # it is loaded, and has no spec
            return True
    return False


def _version(module: ModuleType) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", module.__version__)[:2])
