"""Tests how many cores are used: by the environment, the affinity and the control group."""

import os
from pathlib import Path

import pytest

from octet.hardware import cores
from octet.hardware.cores import idle_cores, usable_cores, wait_briefly


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)


def on_a_machine(
    monkeypatch: pytest.MonkeyPatch, *, allowed: int, quota: float = float("inf")
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(allowed)), raising=False)
    monkeypatch.setattr(cores, "_quota", lambda: quota)


@pytest.mark.parametrize(
    ("allowed", "quota", "expected"),
    [(8, float("inf"), 8), (64, 0.5, 1), (64, 2.5, 3), (2, 16, 2), (1, 0.1, 1)],
)
def test_no_more_than_the_affinity_and_the_quota_allow(
    monkeypatch: pytest.MonkeyPatch, allowed: int, quota: float, expected: int
) -> None:
    on_a_machine(monkeypatch, allowed=allowed, quota=quota)
    assert usable_cores() == expected


@pytest.mark.parametrize(
    ("setting", "expected"), [("3", 3), ("16", 16), ("4,2", 4), ("0", 8), ("many", 8), ("", 8)]
)
def test_what_the_user_sets_is_respected_where_it_is_a_number(
    monkeypatch: pytest.MonkeyPatch, setting: str, expected: int
) -> None:
    on_a_machine(monkeypatch, allowed=8)
    monkeypatch.setenv("OMP_NUM_THREADS", setting)
    assert usable_cores() == expected


@pytest.mark.parametrize(("setting", "expected"), [("1", 4), ("3", 3)])
def test_processes_of_torchrun_share_the_cores(
    monkeypatch: pytest.MonkeyPatch, setting: str, expected: int
) -> None:
    """torchrun sets OMP_NUM_THREADS to 1 itself."""
    on_a_machine(monkeypatch, allowed=8)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("OMP_NUM_THREADS", setting)
    assert usable_cores() == expected


GROUPS: dict[str, tuple[str, dict[str, str], float]] = {
    "version 2": ("0::/a/b", {"a/b/cpu.max": "50000 100000"}, 0.5),
    "one above it": ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "150000 100000"}, 1.5),
    "in a container": ("0::/docker/0af1", {"cpu.max": "200000 100000"}, 2.0),
    "no limit": ("0::/a", {"a/cpu.max": "max 100000"}, float("inf")),
    "no controller": ("0::/a", {}, float("inf")),
    "version 1": (
        "4:memory:/m\n3:cpu,cpuacct:/a\n",
        {"cpu/a/cpu.cfs_quota_us": "25000", "cpu/a/cpu.cfs_period_us": "100000"},
        0.25,
    ),
    "version 1, no limit": (
        "3:cpu,cpuacct:/",
        {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
        float("inf"),
    ),
    "unreadable": ("0::/a", {"a/cpu.max": "much"}, float("inf")),
}


@pytest.mark.parametrize("case", GROUPS)
def test_the_quota_of_a_control_group(case: str, tmp_path: Path) -> None:
    own, files, expected = GROUPS[case]
    (tmp_path / "cgroup").write_text(own)
    for name, text in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert cores._quota(tmp_path / "root", tmp_path / "cgroup") == expected


def test_without_control_groups_nothing_is_limited(tmp_path: Path) -> None:
    assert cores._quota(tmp_path, tmp_path / "absent") == float("inf")


def test_idle_cores_are_those_that_others_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    ticks = iter([(100, 1000), (115, 1020)])  # 15 of 20 were idle
    monkeypatch.setattr(cores, "_ticks", lambda: next(ticks))
    assert idle_cores() == 3.0


def test_where_nothing_tells_all_cores_are_taken_for_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(cores, "_ticks", lambda: (0, 0))
    assert idle_cores() == 4.0


def test_this_machine_can_be_read() -> None:
    assert 0 <= idle_cores() <= (os.cpu_count() or 1) + 1
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)


def test_threads_wait_briefly_unless_the_user_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    wait_briefly()
    assert "GOMP_SPINCOUNT" not in os.environ
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setenv("GOMP_SPINCOUNT", "0")  # gone after the test, as what is set now is
    monkeypatch.setenv("KMP_BLOCKTIME", "0")
    monkeypatch.delenv("KMP_BLOCKTIME")
    monkeypatch.delenv("GOMP_SPINCOUNT")
    wait_briefly()
    assert (os.environ["GOMP_SPINCOUNT"], os.environ["KMP_BLOCKTIME"]) == ("1000", "0")
