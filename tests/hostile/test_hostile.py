"""All hostile upstreams and clients of the tables, against one gateway for each table."""

import asyncio
from pathlib import Path

from tests.hostile.clients import CASES
from tests.hostile.runner import Gateway, against
from tests.hostile.upstreams import REPORTS, SCENARIOS

# A machine that is busy with other work delays answers. `python -m tests.hostile` requires 0.1 s,
# and tests/serve/longest_step.py measures steps of the event loop in processor time.
STALLED_S = 1.0


def require_sound(gateway: Gateway) -> None:
    assert not gateway.violations, "\n".join(gateway.violations)
    print(f"slowest /health {gateway.slowest_health_s * 1000:.0f} ms", end=", ")
    print(f"peak memory {gateway.peak_bytes / 2**20:.0f} MB")
    assert gateway.slowest_health_s < STALLED_S


async def test_upstreams(tmp_path: Path) -> None:
    assert len(SCENARIOS) >= 300
    async with against(tmp_path) as gateway:
        await gateway.play(SCENARIOS)
    assert gateway.upstream.posts >= len(SCENARIOS)
    require_sound(gateway)


async def test_reports(tmp_path: Path) -> None:
    async with against(tmp_path) as gateway:
        for name, report in REPORTS.items():
            gateway.upstream.report = report
            seen = gateway.upstream.gets
            async with asyncio.timeout(10):
                while gateway.upstream.gets < seen + 4:
                    await gateway.play({name: SCENARIOS["s0"]})
    require_sound(gateway)


async def test_clients(tmp_path: Path) -> None:
    assert len(CASES) >= 150
    async with against(tmp_path) as gateway:
        await gateway.play(CASES)
    require_sound(gateway)
