"""Memory of Octet's gateway, and of others, over an hour's worth of requests.

A million requests are 278 a second for an hour; here they come as fast as they are answered, a
tenth of them streamed, from 64 clients. Memory is read after each of 20 parts. The slope is that
of the second half: what was warmed up by then does not count.

    python benchmarks/gateway_peers.py build --python python3.12
    python benchmarks/gateway_memory.py [--requests N] [--output FILE]

What it checks: Octet stays under 120 MB, and grows by less than 1 MB in 100,000 requests.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from card import conditions, report
from gateway_bench import Bench
from gateway_peers import GATEWAYS, Gateway, chosen

PARTS = 20
STREAMED = 0.1
MOST_MB, MOST_MB_PER_100K = 120.0, 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gateways", nargs="*", default=list(GATEWAYS), choices=list(GATEWAYS))
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--limit-s", type=float, default=60.0, help="others than Octet do fewer")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    gateways = chosen(options.gateways)
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(1.0, Path(scratch))
        rows = []
        for gateway in gateways:
            limit_s = float("inf") if gateway.name == "octet" else options.limit_s
            rows.append(long_run(bench, gateway, options.requests, limit_s))
    card = conditions(
        **bench.card(gateways),
        streamed=f"{STREAMED:.0%} of the requests",
        figures="10^6 bytes resident, of the process and its children; slope of the second half",
    )
    report("gateway_memory", card, rows, options.output)
    for row in rows:
        if row["gateway"] == "octet":
            flat = row["slope MB per 100,000"] < MOST_MB_PER_100K and row["MB at the end"] < MOST_MB
            print(f"{'met' if flat else 'MISSED'}: under {MOST_MB:g} MB and flat")


def long_run(bench: Bench, gateway: Gateway, requests: int, limit_s: float) -> dict[str, Any]:
    """Sends `requests`, or as many as take about `limit_s`."""
    print(gateway.name, file=sys.stderr, flush=True)
    with bench.upstream() as ports, bench.running(gateway, ports) as running:
        started_mb = running.rss_mb()
        unary, streams = (max(1.0, f["per_s"]) for f in bench.throughput(running.port))
        per_s = 1 / (STREAMED / streams + (1 - STREAMED) / unary)
        part = max(10, int(min(requests, per_s * limit_s) / PARTS))
        streamed = max(1, int(part * STREAMED))
        done, mb = [], []
        for i in range(PARTS):
            bench.load(running.port, "--requests", streamed, "--warm-up", 0, "--stream")
            bench.load(running.port, "--requests", part - streamed, "--warm-up", 0)
            done.append((i + 1) * part / 1e5)
            mb.append(running.rss_mb())
    half = PARTS // 2
    return {
        "gateway": gateway.name,
        "requests": part * PARTS,
        "MB at start": started_mb,
        "MB after 1/20": mb[0],
        "MB half-way": mb[half - 1],
        "MB at the end": mb[-1],
        "slope MB per 100,000": statistics.linear_regression(done[half:], mb[half:]).slope,
    }


if __name__ == "__main__":
    main()
