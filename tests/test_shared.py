"""Tests the fixtures that tests share: made once, and never those of another version."""

import os
import time
from multiprocessing import get_context
from pathlib import Path

import pytest

from tests import shared as module
from tests.shared import Shared


def write(path: Path) -> None:
    path.mkdir()
    (path / "made").write_text("whole")


def fail(path: Path) -> None:
    path.mkdir()
    (path / "made").write_text("ha")
    raise RuntimeError("interrupted")


def refuse(path: Path) -> None:
    raise AssertionError("was made already")


def in_cache(directory: Path) -> Shared:
    return Shared(directory / "cache", directory / "elsewhere")


def test_made_once(tmp_path: Path) -> None:
    first = in_cache(tmp_path).directory("thing", write, samples=8)
    again = in_cache(tmp_path).directory("thing", refuse, samples=8)
    assert again == first
    assert (again / "made").read_text() == "whole"


def test_other_facts_are_another_thing(tmp_path: Path) -> None:
    shared = in_cache(tmp_path)
    assert shared.directory("thing", write, n=1) != shared.directory("thing", write, n=2)


@pytest.mark.parametrize("part", ["_code", "software", "_arithmetic"])
def test_files_of_another_version_are_left_alone(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = in_cache(tmp_path)
    before = shared.directory("thing", write)
    (before / "made").write_text("by another version")
    monkeypatch.setattr(module, part, lambda *_: "other")
    after = shared.directory("thing", write)
    assert after != before
    assert (after / "made").read_text() == "whole"


def test_what_nobody_asked_for_in_a_week_is_removed(tmp_path: Path) -> None:
    shared = in_cache(tmp_path)
    old, used = shared.directory("old", write), shared.directory("used", write)
    for path in (old, used):
        os.utime(path, (0, time.time() - 8 * 24 * 3600))
    shared.directory("used", refuse)
    shared.directory("new", write)
    assert not old.exists()
    assert used.exists()


def test_an_interrupted_one_is_made_anew(tmp_path: Path) -> None:
    shared = in_cache(tmp_path)
    with pytest.raises(RuntimeError, match="interrupted"):
        shared.directory("thing", fail)
    assert (shared.directory("thing", write) / "made").read_text() == "whole"


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file in its place")
    made = in_cache(tmp_path).directory("thing", write)
    assert made.parent == tmp_path / "elsewhere"
    assert (made / "made").read_text() == "whole"


def ask(directory: Path, log: Path) -> None:
    def slowly(path: Path) -> None:
        write(path)
        time.sleep(0.2)
        with log.open("a") as lines:
            lines.write("made\n")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_arithmetic", dict)  # which would import torch
        in_cache(directory).directory("thing", slowly)


def test_processes_wait_for_who_was_first(tmp_path: Path) -> None:
    log = tmp_path / "log"
    processes = [get_context("spawn").Process(target=ask, args=(tmp_path, log)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert log.read_text() == "made\n"
