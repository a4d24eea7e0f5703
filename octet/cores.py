"""How many CPU cores this process may use, and how OpenMP's threads wait for each other.

A container with half a core of a 64-core machine still sees 64, and 64 threads that take turns on
half a core are many times slower than one. Threads that spin while they wait hold cores that other
processes, or the thread they wait for, need; threads that sleep at once are slow to wake.
"""

import math
import os
import time
from pathlib import Path

__all__ = ["THREADS", "idle_cores", "usable_cores", "wait_briefly"]

THREADS = "OMP_NUM_THREADS"

# libgomp polls so often before a waiting thread sleeps: about 20 µs. Two threads are then as fast
# as two that spin for milliseconds (the default) on idle cores, and eight times as fast on busy
# ones; with none (OMP_WAIT_POLICY=passive) two are slower than one (docs/LOG.md).
_POLLS = "1000"
_SAMPLE_S = 0.05


def wait_briefly() -> None:
    """Lets OpenMP's threads sleep soon after they begin to wait, unless the environment says how.

    OpenMP reads it once, when torch is imported: call it before.
    """
    ours = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}
    if not ours & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = _POLLS
        os.environ["KMP_BLOCKTIME"] = "0"  # ms; of Intel's and LLVM's OpenMP


def usable_cores() -> int:
    """How many cores to compute on, at least 1: OMP_NUM_THREADS if it is set, else those that this
    process may run on, no more than its control group has the time of, rounded up."""
    chosen = os.environ.get(THREADS, "").partition(",")[0].strip()
    if chosen.isdecimal() and int(chosen) > 0:
        return int(chosen)
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, math.ceil(min(allowed or 1, _quota())))


def idle_cores() -> float:
    """How many of this machine's cores had nothing to do in the last 50 ms; all where Linux's
    /proc/stat is not there to tell."""
    before = _ticks()
    time.sleep(_SAMPLE_S)
    after = _ticks()
    idle, total = (x - y for x, y in zip(after, before, strict=True))
    cores = os.cpu_count() or 1
    return cores * idle / total if total > 0 else float(cores)


def _ticks() -> tuple[int, int]:
    """(idle, all) ticks of all cores since the machine started."""
    try:
        with open("/proc/stat") as file:
            ticks = [int(word) for word in file.readline().split()[1:9]]
    except (OSError, ValueError):
        return 0, 0
    return sum(ticks[3:5]), sum(ticks)


def _quota(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float:
    """The cores' worth of time that this control group and those above it grant; inf for no limit.

    Version 2 has `cpu.max` ("50000 100000" or "max 100000"), version 1 two files of microseconds.
    In a container, `own` may name a path of the host's: then the root is the container's own group.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return math.inf
    found = [math.inf]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or "cpu" in controllers.split(","):
            base = root / "cpu" if controllers else root
            group = base / path.lstrip("/")
            found += [_granted(at) for at in (group, *group.parents) if at.is_relative_to(base)]
    return min(found)


def _granted(directory: Path) -> float:
    """What one control group grants."""
    try:
        if (directory / "cpu.max").exists():
            quota, period = (directory / "cpu.max").read_text().split()
        else:
            quota = (directory / "cpu.cfs_quota_us").read_text()
            period = (directory / "cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    except (OSError, ValueError):  # no such file, or "max"
        return math.inf
