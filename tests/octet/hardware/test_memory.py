"""Tests how the kernel's reports of memory are read."""

from pathlib import Path

import pytest

from octet.hardware.memory import available_memory, memory_limit

GB = 1 << 30
UNLIMITED_V1 = str((1 << 63) - 4096)
FILES = dict[str, str]

CASES: dict[str, tuple[FILES, int | None]] = {
    "no cgroup": ({}, None),
    "version 2": (
        {"proc/self/cgroup": "0::/a.slice/b\n", "sys/fs/cgroup/a.slice/b/memory.max": f"{GB}\n"},
        GB,
    ),
    "version 2, no limit": (
        {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "max\n"},
        None,
    ),
    "version 2, the parent's": (
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/b/memory.max": f"{4 * GB}\n",
            "sys/fs/cgroup/a/memory.max": f"{2 * GB}\n",
        },
        2 * GB,
    ),
    "a container's own view": (
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{GB}\n"},
        GB,
    ),
    "a path outside of the mount": (
        {"proc/self/cgroup": "0::/docker/1234\n", "sys/fs/cgroup/memory.max": f"{GB}\n"},
        GB,
    ),
    "version 1": (
        {
            "proc/self/cgroup": "9:cpu,cpuacct:/d\n4:memory:/d\n0::/\n",
            "sys/fs/cgroup/memory/d/memory.limit_in_bytes": f"{GB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{UNLIMITED_V1}\n",
        },
        GB,
    ),
    "version 1, no limit": (
        {
            "proc/self/cgroup": "4:memory:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{UNLIMITED_V1}\n",
        },
        None,
    ),
    "nonsense": ({"proc/self/cgroup": "4:memory\n\n"}, None),
}


def write(root: Path, files: FILES) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize("case", CASES)
def test_the_limit_of_a_control_group(case: str, tmp_path: Path) -> None:
    files, expected = CASES[case]
    write(tmp_path, files)
    assert memory_limit(tmp_path) == expected


MEMINFO = "MemTotal:       64000000 kB\nMemAvailable:   33554432 kB\n"  # 32 GiB are available
STAT = f"anon {2 * GB}\nfile {3 * GB}\ninactive_file {GB}\nactive_file {GB}\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 32 * GB),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, 32 * GB),
        (  # a limit without what is used of it
            {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{GB}\n"},
            32 * GB,
        ),
        (  # 6 of 8 GiB are used, 2 of them for files
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": f"{8 * GB}\n",
                "sys/fs/cgroup/memory.current": f"{6 * GB}\n",
                "sys/fs/cgroup/memory.stat": STAT,
            },
            4 * GB,
        ),
        (  # the parent has less left
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": f"{8 * GB}\n",
                "sys/fs/cgroup/a/b/memory.current": f"{GB}\n",
                "sys/fs/cgroup/a/memory.max": f"{16 * GB}\n",
                "sys/fs/cgroup/a/memory.current": f"{15 * GB}\n",
            },
            GB,
        ),
        (  # lowered below what is used
            {
                "proc/self/cgroup": "4:memory:/d\n0::/\n",
                "sys/fs/cgroup/memory/d/memory.limit_in_bytes": f"{GB}\n",
                "sys/fs/cgroup/memory/d/memory.usage_in_bytes": f"{2 * GB}\n",
                "sys/fs/cgroup/memory/d/memory.stat": "cache 5\ntotal_inactive_file 4096\n",
            },
            0,
        ),
    ],
)
def test_what_is_available(files: FILES, expected: int, tmp_path: Path) -> None:
    write(tmp_path, {"proc/meminfo": MEMINFO, **files})
    assert available_memory(tmp_path) == expected
