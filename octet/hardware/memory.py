"""Reads how much memory this process may use, and can still allocate, on Linux.

A container's limit is that of its control group: cgroups(7), version 2 or 1.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["available_memory", "memory_limit"]

# Version 1 writes "no limit" as the largest multiple of a page, more than any machine has.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class _Version:
    """Names the files of a control group."""

    mount: str
    limit: str
    usage: str
    cached: tuple[str, str]  # lines of memory.stat, children included: page cache


_V1 = _Version(
    "sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_V2 = _Version("sys/fs/cgroup", "memory.max", "memory.current", ("inactive_file", "active_file"))


def memory_limit(root: Path = Path("/")) -> int | None:
    """Returns the bytes that this process's control group may use, its parents' limits included.

    None if there is no limit, or no control group.
    """
    return min((limit for _, _, limit in _limited(root)), default=None)


def available_memory(root: Path = Path("/")) -> int:
    """Returns how many bytes this process can still allocate: what the machine and its groups have.

    The page cache of a group counts as available, as it does in the machine's MemAvailable: the
    kernel drops it first.
    """
    lines = (root / "proc/meminfo").read_text("utf-8").splitlines()
    meminfo = dict(line.split(":", 1) for line in lines)
    found = [int(meminfo["MemAvailable"].split()[0]) << 10]
    for directory, version, limit in _limited(root):
        used = _number(directory / version.usage)
        if used is not None:
            found.append(max(0, limit - max(0, used - _cached(directory, version))))
    return min(found)


def _limited(root: Path) -> Iterator[tuple[Path, _Version, int]]:
    """Yields the groups of this process that have a limit, from its own up, and the limit in bytes.

    In a container with its own view of the groups, the path of its own may not exist below the
    mount: then the mount is the container's group.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for line in lines:
        _, controllers, path = line.split(":", 2) if line.count(":") > 1 else ("", "none", "")
        if controllers and "memory" not in controllers.split(","):
            continue
        version = _V1 if controllers else _V2
        mount = root / version.mount
        directory = mount / path.strip("/")
        for group in (directory, *directory.parents):
            limit = _number(group / version.limit)
            if limit is not None and limit < _NO_LIMIT:
                yield group, version, limit
            if group == mount:
                break


def _number(file: Path) -> int | None:
    """Reads a file of one number; None if there is none, or it says "max"."""
    try:
        text = file.read_text("utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _cached(directory: Path, version: _Version) -> int:
    """Returns the bytes of a group's page cache; 0 if they are unknown."""
    try:
        lines = (directory / "memory.stat").read_text("utf-8").splitlines()
    except OSError:
        return 0
    found = dict(line.split(" ", 1) for line in lines if " " in line)
    return sum(int(found.get(name, 0)) for name in version.cached)
