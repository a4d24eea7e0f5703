"""Mutates hostile upstreams and clients for some minutes: `python -m tests.hostile --minutes 10`.

Prints what it found, and the seed with which the same run can be repeated.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from tests.hostile.clients import CASES, Case
from tests.hostile.runner import MOST_HEALTH_S, against
from tests.hostile.upstreams import SCENARIOS, Scenario

BATCH = 64
MOST_MUTATIONS = 8


def mutated(data: bytes, others: list[bytes], rng: random.Random) -> bytes:
    """Changes, removes, repeats or inserts some bytes, or splices in a part of another case."""
    for _ in range(rng.randint(1, MOST_MUTATIONS)):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice((1, 1, 2, 8, 64, 1024)))
        kind = rng.randrange(6)
        if kind == 0:
            data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        elif kind == 1:
            data = data[:at] + data[end:]
        elif kind == 2:
            data = data[:end] + data[at:end] * rng.choice((1, 2, 50)) + data[end:]
        elif kind == 3:
            data = (
                data[:at] + rng.choice((b"\r\n", b"\n\n", b"\0", b"{", b'"', b"\xff")) + data[at:]
            )
        elif kind == 4:
            other = rng.choice(others)
            begin = rng.randrange(len(other) + 1)
            data = data[:at] + other[begin : begin + rng.choice((4, 64, 4096))] + data[at:]
        else:
            data = data[:at]
    return data[:4_000_000]


def mutant(scenario: Scenario, others: list[bytes], rng: random.Random) -> Scenario:
    steps = [
        mutated(step, others, rng) if isinstance(step, bytes) and rng.random() < 0.5 else step
        for step in scenario.steps
    ]
    return replace(scenario, steps=tuple(steps), stream=rng.random() < 0.6)


async def run(minutes: float, seed: int) -> int:
    rng = random.Random(seed)
    scenarios = list(SCENARIOS.values())
    upstream_bytes = [s for one in scenarios for s in one.steps if isinstance(s, bytes)]
    client_bytes = [case.sent for case in CASES]
    end, count = time.monotonic() + 60 * minutes, 0
    with tempfile.TemporaryDirectory() as directory:
        async with against(Path(directory)) as gateway:
            while time.monotonic() < end and not gateway.failed:
                mutants = {
                    f"m{count + i}": mutant(rng.choice(scenarios), upstream_bytes, rng)
                    for i in range(BATCH)
                }
                gateway.upstream.scenarios = mutants
                await gateway.play(mutants)
                attacks = [
                    Case(case.name, mutated(case.sent, client_bytes, rng))
                    for case in rng.choices(CASES, k=BATCH)
                ]
                await gateway.play(attacks)
                count += 2 * BATCH
    print(f"seed {seed}: {count} cases, slowest /health {gateway.slowest_health_s * 1000:.0f} ms")
    print(f"peak memory {gateway.peak_bytes / 2**20:.0f} MB, violations: {len(gateway.violations)}")
    for violation in gateway.violations[:20]:
        print(f"  {violation}")
        for name, scenario in gateway.upstream.scenarios.items():
            if f"request_id={name}\n" in violation:
                print(f"    {scenario}"[:3000])
    return int(bool(gateway.violations) or gateway.slowest_health_s > MOST_HEALTH_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    options = parser.parse_args()
    sys.exit(asyncio.run(run(options.minutes, options.seed)))


if __name__ == "__main__":
    main()
