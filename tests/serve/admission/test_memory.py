"""Tests how much of its memory a gateway allows itself."""

from pathlib import Path

import pytest

from serve.admission.memory import Memory
from tests.serve.clock import Clock

GB = 1 << 30
LIMITED = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{GB}\n"}


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_four_fifths_of_it_may_be_resident(tmp_path: Path) -> None:
    clock = Clock()
    write(tmp_path, LIMITED)
    memory = Memory(clock=clock, root=tmp_path)
    assert memory.limit == int(0.8 * GB)
    resident = {"small": 0.7 * GB, "large": 0.81 * GB}
    pages = {name: int(size) // memory.page_bytes for name, size in resident.items()}
    write(tmp_path, {"proc/self/statm": f"999999 {pages['small']} 1 1 0 1 0\n"})
    assert not memory.is_short()
    write(tmp_path, {"proc/self/statm": f"999999 {pages['large']} 1 1 0 1 0\n"})
    assert not memory.is_short()  # read a moment ago
    clock.now += 0.25
    assert memory.is_short()
    write(tmp_path, {"proc/self/statm": f"999999 {pages['small']} 1 1 0 1 0\n"})
    clock.now += 0.25
    assert not memory.is_short()


def test_what_is_unknown_refuses_nobody(tmp_path: Path) -> None:
    assert not Memory(root=tmp_path).is_short()
    assert not Memory(1, root=tmp_path).is_short()  # no /proc: not Linux
    write(tmp_path, {"proc/self/statm": "nonsense\n"})
    assert not Memory(1, root=tmp_path).is_short()


def test_this_process_on_this_machine() -> None:
    memory = Memory(1)
    if not Path("/proc/self/statm").exists():
        assert not memory.is_short()
        return
    assert memory.is_short()
    for limit in (1, 1 << 60, None):
        used = Memory(limit).used  # known before any request, with a limit and without
        assert used is not None and 10e6 < used < 100e9
    assert not Memory(1 << 60).is_short()


def test_a_limit_below_what_is_loaded_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pages = (GB // 2) // Memory(root=tmp_path).page_bytes
    write(tmp_path, {"proc/self/statm": f"999999 {pages} 1 1 0 1 0\n"})
    Memory(GB, root=tmp_path).warn()
    assert not caplog.messages
    Memory(GB // 4, root=tmp_path).warn()
    (message,) = caplog.messages
    assert f"is {GB // 4}, but the process has {GB // 2} already" in message
