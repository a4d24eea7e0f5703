"""Quotas survive a restart, and a file that cannot be read is not the end."""

import json
import logging
from datetime import UTC, datetime
from pathlib import Path

import pytest

from serve.access.usage import WRITE_EVERY_S, Usage
from tests.serve.clock import Clock

NOON = datetime(2027, 3, 1, 12, tzinfo=UTC).timestamp()


def test_what_was_spent_is_known_after_a_restart(tmp_path: Path) -> None:
    path, wall = tmp_path / "usage.json", Clock(NOON)
    usage = Usage(path, wall)
    usage.add("a", 70)
    usage.add("a", 5)
    usage.write()
    again = Usage(path, wall)
    assert (again.spent("a"), again.spent("b")) == (75, 0)
    assert list(tmp_path.iterdir()) == [path]


def test_the_file_is_written_now_and_then_not_each_time(tmp_path: Path) -> None:
    path, wall, clock = tmp_path / "usage.json", Clock(NOON), Clock()
    usage = Usage(path, wall, clock)
    usage.add("a", 1)
    assert not path.exists()
    wall.now -= 60  # set back: the time goes on all the same
    clock.now += WRITE_EVERY_S
    usage.add("a", 1)
    assert json.loads(path.read_text()) == {"version": 1, "day": "2027-03-01", "tokens": {"a": 2}}
    usage.add("a", 1)
    assert json.loads(path.read_text())["tokens"] == {"a": 2}
    usage.write()
    path.unlink()
    usage.write()  # nothing new
    assert not path.exists()


def test_a_day_ends_at_midnight_utc(tmp_path: Path) -> None:
    path, wall = tmp_path / "usage.json", Clock(NOON)
    usage = Usage(path, wall)
    usage.add("a", 9)
    assert usage.reset_s() == 12 * 3600
    usage.write()
    wall.now += usage.reset_s()
    assert usage.spent("a") == 0
    assert Usage(path, wall).spent("a") == 0
    usage.add("a", 4)
    wall.now -= 3600  # a clock that is set back gives no quota twice
    assert usage.spent("a") == 4


def test_a_clock_that_was_days_ahead_for_a_moment_does_not_freeze_the_quota(tmp_path: Path) -> None:
    path, wall = tmp_path / "usage.json", Clock(NOON)
    usage = Usage(path, wall)
    wall.now += 400 * 86_400
    usage.add("a", 9)
    usage.write()
    wall.now -= 400 * 86_400
    assert Usage(path, wall).spent("a") == 9  # a restart meanwhile
    usage.add("a", 1)
    assert usage.spent("a") == 10  # it gives no quota twice
    wall.now += usage.reset_s()
    assert usage.spent("a") == 0
    usage.add("a", 2)
    usage.write()
    assert Usage(path, wall).spent("a") == 2


CORRUPT = {
    "empty": b"",
    "half": b'{"version": 1, "day": "2027-',
    "not text": b"\xff\xfe\x00",
    "another kind": b"[1, 2]",
    "another version": b'{"version": 2, "day": "2027-03-01", "tokens": {}}',
    "negative": b'{"version": 1, "day": "2027-03-01", "tokens": {"a": -5}}',
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("case", CORRUPT)
def test_a_corrupt_file_is_said_and_set_aside(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "usage.json"
    path.write_bytes(CORRUPT[case])
    usage = Usage(path, Clock(NOON))
    assert usage.spent("a") == 0
    assert "usage.json.unusable, and quotas begin at zero" in caplog.text
    assert (tmp_path / "usage.json.unusable").read_bytes() == CORRUPT[case]
    usage.add("a", 3)
    usage.write()
    assert Usage(path, Clock(NOON)).spent("a") == 3


def test_a_disk_that_cannot_be_written_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    usage = Usage(tmp_path / "absent" / "usage.json", Clock(NOON))
    usage.add("a", 3)
    usage.write()
    assert "not written: No such file or directory" in caplog.text
    assert usage.spent("a") == 3
