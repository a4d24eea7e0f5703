"""Finds GPUs and CPUs by name or capability: memory, bandwidth and throughput, from devices.yaml.

A capability is NVIDIA's compute capability ("9.0"), AMD's target ("gfx942"), "gaudi3", or what a
CPU has: "cpu-amx" (which has AVX-512 too), "cpu-avx512" or "cpu".
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

import yaml

from octet.errors import ConfigError, nearest

__all__ = ["Device", "Vendor", "devices", "find_device", "host_capability", "read_table"]

Vendor = Literal["nvidia", "amd", "intel", "cpu"]
_MIB = 2**20
_COMPUTE = re.compile(r"(?:computecapability|sm)?(\d{1,2})\.?(\d)a?")


@dataclass(frozen=True)
class Device:
    """A GPU, or the CPU of a machine. Figures are those of one GPU; None if not known."""

    name: str
    vendor: Vendor
    capability: str
    memory: int | None = None  # bytes
    bandwidth: float | None = None  # bytes/s, of that memory
    flops_16bit: float | None = None  # dense, per second: BF16; FP16 on a T4
    flops_fp8: float | None = None
    flops_fp4: float | None = None
    source: str = ""  # of the figures; empty: only the capability is known

    @property
    def fnuz(self) -> bool:
        """Returns whether its E4M3 is FNUZ: largest value 240, and no negative zero."""
        return self.capability == "gfx942"

    @property
    def compute(self) -> tuple[int, int] | None:
        """NVIDIA's compute capability as numbers; None for other vendors."""
        if self.vendor != "nvidia":
            return None
        major, _, minor = self.capability.partition(".")
        return int(major), int(minor)


@cache
def devices() -> tuple[Device, ...]:
    """Returns the devices of the table."""
    return tuple(device for device, _ in _table())


def find_device(name: str) -> Device:
    """Returns the device that a driver, a capability or a common name means.

    A name that is not in the table, with a compute capability such as "8.7" or "sm87", becomes a
    device without figures. Raises ConfigError, with the nearest name, for any other.
    """
    wanted = " ".join(name.lower().replace("_", " ").split())
    found = [
        (len(alias), device)
        for device, aliases in _table()
        for alias in aliases
        if re.search(rf"(?<![a-z0-9]){re.escape(alias)}(?![a-z0-9])", wanted)
    ]
    if found:
        return max(found, key=lambda pair: pair[0])[1]
    compact = wanted.replace(" ", "")
    if match := re.fullmatch(r"(?:amd)?(gfx[0-9a-f]{3,4})", compact):
        return Device(f"AMD {match[1]}", "amd", match[1])
    if match := _COMPUTE.fullmatch(compact):
        capability = f"{match[1]}.{match[2]}"
        return Device(f"compute capability {capability}", "nvidia", capability)
    known = [device.name.lower() for device in devices()]
    raise ConfigError(
        f"unknown GPU '{name}': name one, or its compute capability, such as 8.6"
        f"{nearest(wanted, known)}"
    )


def host_capability(flags: str) -> str:
    """Returns the capability of a CPU with these flags, as /proc/cpuinfo lists them."""
    words = set(flags.split())
    if "amx_tile" in words:
        return "cpu-amx"
    return "cpu-avx512" if "avx512f" in words else "cpu"


def read_table(name: str) -> Any:
    """Returns the content of a YAML file of this package."""
    text = (resources.files("octet.hardware") / name).read_text("utf-8")
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


@cache
def _table() -> tuple[tuple[Device, tuple[str, ...]], ...]:
    return tuple(
        (_device(row), (row["name"].lower(), *row["names"])) for row in read_table("devices.yaml")
    )


def _device(row: Mapping[str, Any]) -> Device:
    def scaled(key: str, factor: float) -> float | None:
        return row[key] * factor if key in row else None

    memory = scaled("memory_mib", _MIB) or scaled("memory_gb", 1e9)
    return Device(
        name=row["name"],
        vendor=row["vendor"],
        capability=row["capability"],
        memory=None if memory is None else int(memory),
        bandwidth=scaled("bandwidth", 1e9),
        flops_16bit=scaled("16bit", 1e12),
        flops_fp8=scaled("fp8", 1e12),
        flops_fp4=scaled("fp4", 1e12),
        source=row["source"],
    )
