"""Octet's gateway beside others: the same requests, upstream, cores and client for each.

The upstream answers at once with canned bytes (gateway_mock.py), so that what is measured is the
gateway. Each has one worker on one core; upstream and client are on others, or share the second
of two. Rounds alternate between the gateways, each started anew; figures are medians of rounds.

    python benchmarks/gateway_peers.py build --python python3.12
    python benchmarks/gateway_comparison.py [--rounds N] [--output FILE]

Where other programs run, `chrt --fifo 1` before it keeps them out of the tails.

What it checks, of Octet with all its features on: at least half the requests/s of a bare FastAPI
and aiohttp pass-through; 15 times LiteLLM's requests/s and streams/s, and twice those of vLLM
production-stack's router; at one client, 0.8 ms added at the median; in open loop at 30 % of its
capacity, 2.3 ms added at the 99th percentile; under 120 MB (gateway_memory.py has it over time).
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from card import conditions, report
from gateway_bench import CLIENTS, Bench, Figures
from gateway_peers import GATEWAYS, Gateway, chosen

SHARE = 0.3  # of a gateway's own capacity, in open loop

AT_LEAST = (
    ("requests/s", "bare", 0.5),
    ("requests/s", "litellm", 15),
    ("streams/s", "litellm", 15),
    ("requests/s", "production-stack", 2),
    ("streams/s", "production-stack", 2),
)
AT_MOST = (("p50 added ms", 0.8), ("open p99 added ms", 2.3), ("MB loaded", 120))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gateways", nargs="*", default=list(GATEWAYS), choices=list(GATEWAYS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    gateways = chosen(options.gateways)
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(options.seconds, Path(scratch))
        rounds = [one_round(bench, gateways, i) for i in range(options.rounds)]
    rows = table(rounds)
    card = conditions(
        **bench.card(gateways),
        clients=f"{CLIENTS}, but 1 for latency; open loop: Poisson at {SHARE:.0%} of capacity",
        rounds=options.rounds,
        seconds_each=options.seconds,
        client_busy=f"{bench.client_busy:.0%} of its core at most, in closed loop",
        figures="added = through the gateway - direct, of the same round; MB of the process tree",
    )
    report("gateway_comparison", card, rows, options.output)
    print("\n".join(verdicts({row["figure"]: row for row in rows})))


def one_round(bench: Bench, gateways: list[Gateway], number: int) -> dict[str, Figures]:
    """Every figure of every gateway once; the order turns with `number`."""
    turn = number % len(gateways)
    with bench.upstream() as ports:
        unary, streams = bench.throughput(ports[0])
        alone = one_client(bench, ports[0])
        result = {"direct": speeds(unary, streams, alone, alone)}
        for gateway in gateways[turn:] + gateways[:turn]:
            figures = result[gateway.name] = measure(bench, gateway, ports, alone)
            line = ", ".join(f"{key} {value:.4g}" for key, value in figures.items())
            print(f"round {number + 1}: {gateway.name}: {line}", file=sys.stderr, flush=True)
    return {name: result[name] for name in ("direct", *(g.name for g in gateways))}


def measure(bench: Bench, gateway: Gateway, ports: list[int], alone: Figures) -> Figures:
    """`alone`: what one client saw without a gateway."""
    with bench.running(gateway, ports) as running:
        started_mb = running.rss_mb()
        unary, streams = bench.throughput(running.port)
        bench.client_busy = max(bench.client_busy, unary["client_busy"], streams["client_busy"])
        loaded_mb = running.rss_mb()
        figures = speeds(unary, streams, one_client(bench, running.port), alone)
        rate = SHARE * unary["per_s"]
        through = open_loop(bench, running.port, rate)
    straight = open_loop(bench, ports[0], rate)
    return figures | {
        "open p50 added ms": through["p50_ms"] - straight["p50_ms"],
        "open p99 added ms": through["p99_ms"] - straight["p99_ms"],
        "start s": running.start_s,
        "MB at start": started_mb,
        "MB loaded": loaded_mb,
    }


def one_client(bench: Bench, port: int) -> Figures:
    return bench.load(port, "--clients", 1, "--seconds", bench.seconds)


def open_loop(bench: Bench, port: int, rate: float) -> Figures:
    """Twice as long: its 99th percentile is of fewer requests."""
    return bench.load(port, "--rate", rate, "--seconds", 2 * bench.seconds)


def speeds(unary: Figures, streams: Figures, one: Figures, direct: Figures) -> Figures:
    return {
        "requests/s": unary["per_s"],
        "streams/s": streams["per_s"],
        "p50 ms": one["p50_ms"],
        "p50 added ms": one["p50_ms"] - direct["p50_ms"],
        "p99 added ms": one["p99_ms"] - direct["p99_ms"],
    }


def table(rounds: list[dict[str, Figures]]) -> list[dict[str, Any]]:
    """A row a figure, a column a gateway; medians of the rounds."""
    columns = {
        name: {key: statistics.median(r[name][key] for r in rounds) for key in figures}
        for name, figures in rounds[0].items()
    }
    every = dict.fromkeys(key for figures in columns.values() for key in figures)
    return [
        {"figure": key} | {name: figures.get(key) for name, figures in columns.items()}
        for key in every
    ]


def verdicts(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    """One line a target: what was wanted, what was measured."""
    if "octet" not in rows["requests/s"]:
        return
    for key, peer, least in AT_LEAST:
        if peer in rows[key]:
            ratio = rows[key]["octet"] / rows[key][peer]
            met = "met" if ratio >= least else "MISSED"
            yield f"{met}: {key} {ratio:.2f} times {peer}'s; wanted: {least:g} times"
    for key, most in AT_MOST:
        met = "met" if rows[key]["octet"] <= most else "MISSED"
        yield f"{met}: {key} {rows[key]['octet']:.3g}; wanted: at most {most:g}"


if __name__ == "__main__":
    main()
