"""Evidence is there whole, of one run, and never where a server would stumble over it."""

import os
from pathlib import Path
from typing import Any

import pytest

from calibrate.quality.refused import (
    EVIDENCE_FILE,
    check_refused,
    drop_refused,
    keep_refused,
    refused_directory,
    refused_entry,
)
from octet.errors import ArtifactError


def keep(path: Path, text: str) -> None:
    with keep_refused(path) as directory:
        (directory / EVIDENCE_FILE).write_text(text)


def test_where_it_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert refused_directory(Path("out")) == tmp_path / "here" / "out.refused"
    assert refused_directory(Path(".")) == tmp_path / "here.refused"
    assert refused_entry(Path("models/a")) == tmp_path / "here" / "models.refused" / "a"
    with pytest.raises(ArtifactError, match="root directory"):
        refused_directory(Path("/"))


def test_a_later_run_takes_the_place_of_an_earlier(tmp_path: Path) -> None:
    path = tmp_path / "out.refused"
    keep(path, "first")
    keep(path, "second")
    assert (path / EVIDENCE_FILE).read_text() == "second"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_interrupted_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.refused"
    keep(path, "first")
    replace = os.replace

    def interrupted(source: Any, to: Any) -> None:
        if Path(to) == path and Path(source).name != "old":
            raise KeyboardInterrupt
        replace(source, to)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        keep(path, "second")
    assert (path / EVIDENCE_FILE).read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_is_not_followed_and_said_at_once(tmp_path: Path) -> None:
    keep(tmp_path / "elsewhere", "mine")
    (tmp_path / "out.refused").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArtifactError, match="is a symbolic link"):
        check_refused(tmp_path / "out.refused")
    drop_refused(tmp_path / "out.refused")
    assert (tmp_path / "elsewhere" / EVIDENCE_FILE).is_file()


def test_dropped_with_the_directory_of_its_repository(tmp_path: Path) -> None:
    one, other = (refused_entry(tmp_path / "models" / name) for name in "ab")
    keep(one, "one")
    keep(other, "other")
    drop_refused(one)
    assert [path.name for path in (tmp_path / "models.refused").iterdir()] == ["b"]
    drop_refused(other)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine.refused").mkdir()
    drop_refused(tmp_path / "mine.refused")
    assert (tmp_path / "mine.refused").is_dir()
