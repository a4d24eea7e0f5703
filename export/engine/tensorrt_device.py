"""Which NVIDIA GPU is here, asked of its driver: no CUDA library has to be installed."""

import ctypes
import sys
from dataclasses import dataclass
from typing import Any

__all__ = ["Gpu", "find_gpu"]

_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CUdevice_attribute


@dataclass(frozen=True)
class Gpu:
    """The GPU that this process sees first."""

    name: str  # such as "NVIDIA H200"
    target: str  # such as "sm90"


def find_gpu() -> Gpu | None:
    """None without a driver or without a GPU that it shows to this process."""
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
