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
