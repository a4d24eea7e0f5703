"""All hostile upstreams and clients of the tables, against one gateway for each table."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from tests.hostile.clients import CASES
from tests.hostile.runner import Gateway, against
from tests.hostile.upstreams import REPORTS, SCENARIOS

# A machine that is busy with other work delays answers. `python -m tests.hostile` requires 0.1 s,
# and tests/serve/longest_step.py measures steps of the event loop in processor time.
STALLED_S = 1.0


async def require_sound(directory: Path, play: Callable[[Gateway], Awaitable[None]]) -> None:
    """Plays against a gateway, and again where /health was held up.

    What the gateway causes comes again each time; a machine that stops for a moment does not.
    """
    for _ in range(3):
        async with against(directory) as gateway:
            await play(gateway)
        print(f"slowest /health {gateway.slowest_health_s * 1000:.0f} ms", end=", ")
        print(f"peak memory {gateway.peak_bytes / 2**20:.0f} MB")
        if gateway.slowest_health_s < STALLED_S:
            break
    assert not gateway.violations, "\n".join(gateway.violations)
    assert gateway.slowest_health_s < STALLED_S


async def test_upstreams(tmp_path: Path) -> None:
    assert len(SCENARIOS) >= 300

    async def play(gateway: Gateway) -> None:
        await gateway.play(SCENARIOS)
        assert gateway.upstream.posts >= len(SCENARIOS)

    await require_sound(tmp_path, play)


async def test_reports(tmp_path: Path) -> None:
    async def play(gateway: Gateway) -> None:
        for name, report in REPORTS.items():
            gateway.upstream.report = report
            seen = gateway.upstream.gets
            async with asyncio.timeout(60):
                while gateway.upstream.gets < seen + 4:
                    await gateway.play({name: SCENARIOS["s0"]})

    await require_sound(tmp_path, play)


async def test_clients(tmp_path: Path) -> None:
    assert len(CASES) >= 150
    await require_sound(tmp_path, lambda gateway: gateway.play(CASES))
