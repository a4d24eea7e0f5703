"""Counts the CPU cores that this process may use, and sets how OpenMP threads wait.

A container limited to half a core of a 64-core machine still sees 64 cores, and 64 threads that
share half a core are many times slower than one. A thread that spins while it waits occupies a
core that other processes need; a thread that sleeps at once is slow to wake.
"""

import math
import os
import time
from pathlib import Path

__all__ = ["THREADS", "chosen_threads", "idle_cores", "usable_cores", "wait_briefly"]

THREADS = "OMP_NUM_THREADS"

# How often libgomp polls before a waiting thread sleeps; 1,000 polls take about 20 µs. On idle
# cores two threads are then as fast as with libgomp's default of milliseconds, on busy cores three
# times as fast. Without polling (OMP_WAIT_POLICY=passive) two are slower than one (docs/LOG.md).
_POLLS = "1000"
_SAMPLE_S = 0.05


def wait_briefly() -> None:
    """Lets OpenMP threads sleep soon after they begin to wait, unless the environment sets this.

    OpenMP reads the setting once, when torch is imported. Call this before.
    """
    settings = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}
    if not settings & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = _POLLS
        os.environ["KMP_BLOCKTIME"] = "0"  # ms; of Intel's and LLVM's OpenMP


def chosen_threads() -> int | None:
    """Returns OMP_NUM_THREADS, or None if the user has not set it: torchrun sets it to 1 then."""
    chosen = os.environ.get(THREADS, "").partition(",")[0].strip()
    started = "TORCHELASTIC_RUN_ID" in os.environ  # by torchrun
    usable = chosen.isdecimal() and int(chosen) > 0 and not (started and chosen == "1")
    return int(chosen) if usable else None


def usable_cores() -> int:
    """Returns the number of cores to compute on, at least 1.

    OMP_NUM_THREADS if the user has set it; else the cores that this process may run on, limited by
    the CPU quota of its control group, rounded up. torchrun's processes share those of their
    machine.
    """
    if (chosen := chosen_threads()) is not None:
        return chosen
    started = "TORCHELASTIC_RUN_ID" in os.environ
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if started else 1
    return max(1, math.ceil(min(allowed or 1, _quota())) // processes)


def idle_cores() -> float:
    """Measures for 50 ms how many of this machine's cores are idle.

    Returns all cores where Linux's /proc/stat does not exist.
    """
    before = _ticks()
    time.sleep(_SAMPLE_S)
    after = _ticks()
    idle, total = (x - y for x, y in zip(after, before, strict=True))
    cores = os.cpu_count() or 1
    return cores * idle / total if total > 0 else float(cores)


def _ticks() -> tuple[int, int]:
    """Returns the (idle, total) ticks of all cores since the machine started."""
    try:
        with open("/proc/stat", encoding="utf-8") as file:
            ticks = [int(word) for word in file.readline().split()[1:9]]
    except (OSError, ValueError):
        return 0, 0
    return sum(ticks[3:5]), sum(ticks)


def _quota(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float:
    """Returns the CPU quota of this control group and its parents, in cores; inf without one.

    Version 2 has `cpu.max` ("50000 100000" or "max 100000"), version 1 two files of microseconds.
    In a container, `own` may name a path of the host's: then the root is the container's own group.
    """
    try:
        lines = own.read_text("utf-8").splitlines()
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
    """Returns the CPU quota of one control group, in cores."""
    try:
        if (directory / "cpu.max").exists():
            quota, period = (directory / "cpu.max").read_text("utf-8").split()
        else:
            quota = (directory / "cpu.cfs_quota_us").read_text("utf-8")
            period = (directory / "cpu.cfs_period_us").read_text("utf-8")
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    except (OSError, ValueError):  # no such file, or "max"
        return math.inf
