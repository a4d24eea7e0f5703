"""Progress bars: their rate and the time left, however slow the steps are."""

import io

import pytest
from rich.console import Console

from octet.progress import progress_bar


@pytest.mark.parametrize("kept", [0, 50_000])
def test_rate_and_time_left_are_those_of_this_run_though_a_step_takes_minutes(kept: int) -> None:
    now = 0.0
    stream = io.StringIO()
    console = Console(file=stream, width=120, get_time=lambda: now)
    with progress_bar(console, "Work", 100_000) as advance:
        advance(kept)
        for _ in range(2):
            now += 200
            advance(10_000)
    left_s = (80_000 - kept) // 50
    assert f"{kept + 20_000:,}/100,000 tokens 50 tokens/s" in stream.getvalue()
    assert f"ETA 0:{left_s // 60:02}:{left_s % 60:02}" in stream.getvalue()


@pytest.mark.parametrize("width", [40, 79, 80, 99, 100, 200])
def test_a_bar_is_one_whole_line_on_any_terminal(width: int) -> None:
    now = 0.0
    stream = io.StringIO()
    console = Console(file=stream, width=width, get_time=lambda: now)
    with progress_bar(console, "Expected divergence", 126_727) as advance:
        now += 10
        advance(6_727)
        now += 10
        advance(20_000)
    (line,) = stream.getvalue().splitlines()
    assert line.startswith("Expected divergence ") and "…" not in line
    assert line.rstrip().endswith(" ETA 0:00:50" if width >= 80 else " 21% ETA 0:00:50")
    assert ("26,727/126,727 tokens 2,000 tokens/s" in line) == (width >= 80)
    assert ("elapsed 0:00:20" in line) == (width >= 100)


def test_a_rate_of_less_than_one_step_a_second_is_not_shown_as_none() -> None:
    now = 0.0
    stream = io.StringIO()
    console = Console(file=stream, width=120, get_time=lambda: now)
    with progress_bar(console, "Round", 20, "runs") as advance:
        for _ in range(2):
            now += 40
            advance(1)
    assert "2/20 runs 0.025 runs/s" in stream.getvalue()
