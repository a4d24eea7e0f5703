"""Octet's gateway beside others: the same requests, upstream, cores and client for each.

The upstream answers at once with canned bytes (gateway_mock.py), so that what is measured is the
gateway. Each has one worker on one core; upstream and client are on others, or share the second
of two. Rounds alternate between the gateways, each started anew; figures are medians of rounds.

    python benchmarks/gateway_peers.py build --python python3.12
    python benchmarks/gateway_comparison.py [--rounds N] [--output FILE]

What it checks, of Octet with all its features on: at least half the requests/s of a bare FastAPI
and aiohttp pass-through; 15 times LiteLLM's requests/s and streams/s, and twice those of vLLM
production-stack's router; at one client, 0.8 ms added at the median; in open loop at 30 % of its
capacity, 2.3 ms added at the 99th percentile; under 120 MB, flat over 300,000 requests.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from card import conditions, report
from gateway_load import PROMPT_CHARACTERS
from gateway_mock import CHUNKS
from gateway_peers import GATEWAYS, KEY, Gateway, version
from gateway_process import Running, cores

HERE = Path(__file__).parent
CLIENTS = 64
SHARE = 0.3  # of a gateway's own capacity, in open loop
SEGMENTS = 20  # of the long run, with a reading of memory after each
STREAMED = 0.1  # of the long run's requests

AT_LEAST = (
    ("requests/s", "bare", 0.5),
    ("requests/s", "litellm", 15),
    ("streams/s", "litellm", 15),
    ("requests/s", "production-stack", 2),
    ("streams/s", "production-stack", 2),
)
AT_MOST = (("p50 added ms", 0.8), ("open p99 added ms", 2.3), ("MB at the end", 120))

Figures = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gateways", nargs="*", default=list(GATEWAYS), choices=list(GATEWAYS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--requests", type=int, default=300_000, help="of the long run")
    parser.add_argument("--long-run-s", type=float, default=60.0, help="others than Octet do fewer")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    gateways = [GATEWAYS[name] for name in options.gateways]
    if missing := [g.peer for g in gateways if g.missing]:
        parser.error(f"not built: {', '.join(map(str, missing))}; see gateway_peers.py")
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(options.seconds, Path(scratch))
        rounds = [bench.round(gateways, i) for i in range(options.rounds)]
        long = {}
        for gateway in gateways:
            limit_s = float("inf") if gateway.name == "octet" else options.long_run_s
            long[gateway.name] = bench.long_run(gateway, options.requests, limit_s)
    rows = table(rounds, long)
    card = conditions(
        gateways=sorted({version(gateway) for gateway in gateways}),
        workers=1,
        cores_used=dict(zip(("upstream", "client", "gateway"), bench.cores, strict=True)),
        upstream=f"answers at once; a stream is {CHUNKS} events, each in a turn of its own",
        request=f"chat completion, {PROMPT_CHARACTERS} characters, kept connections",
        clients=f"{CLIENTS}, but 1 for latency; open loop: Poisson at {SHARE:.0%} of capacity",
        rounds=options.rounds,
        seconds_each=options.seconds,
        octet="key with rates and quotas, admission by tokens, least_tokens over 2 backends, "
        "health checks, breaker, metrics; traces off",
        client_busy=f"{bench.client_busy:.0%} of its core at most; in open loop it spins",
        figures="added = through the gateway - direct, of the same round; MB of the process tree",
    )
    report("gateway_comparison", card, rows, options.output)
    print("\n".join(verdicts({row["figure"]: row for row in rows})))


class Bench:
    def __init__(self, seconds: float, scratch: Path) -> None:
        self.seconds = seconds
        self.scratch = scratch
        self.cores = cores()
        self.client_busy = 0.0

    @contextmanager
    def upstream(self) -> Iterator[list[int]]:
        """The mock's ports, while it runs."""
        command = [sys.executable, str(HERE / "gateway_mock.py"), "--core", str(self.cores[0])]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as mock:
            assert mock.stdout is not None
            try:
                yield [int(port) for port in mock.stdout.readline().split()]
            finally:
                mock.terminate()

    def load(self, port: int, *options: object) -> dict[str, Any]:
        command = [sys.executable, str(HERE / "gateway_load.py"), "--port", port, "--key", KEY]
        command += ["--core", self.cores[1], *options]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"the load failed: {done.stderr[-2000:]}")
        figures: dict[str, Any] = json.loads(done.stdout)
        if figures["errors"]:
            raise SystemExit(f"{figures['errors']} wrong answers, such as: {figures['example']}")
        return figures

    def throughput(self, port: int) -> tuple[Figures, Figures]:
        """Closed loop of all clients: whole answers, then streams."""
        timed = ("--clients", CLIENTS, "--seconds", self.seconds)
        return self.load(port, *timed), self.load(port, *timed, "--stream")

    def one_client(self, port: int) -> Figures:
        return self.load(port, "--clients", 1, "--seconds", self.seconds)

    def open_loop(self, port: int, rate: float) -> Figures:
        """Twice as long: its 99th percentile is of fewer requests."""
        return self.load(port, "--rate", rate, "--seconds", 2 * self.seconds)

    def round(self, gateways: list[Gateway], number: int) -> dict[str, Figures]:
        """Every figure of every gateway once; the order turns with `number`."""
        turn = number % len(gateways)
        with self.upstream() as ports:
            direct = ports[0]
            unary, streams = self.throughput(direct)
            alone = self.one_client(direct)
            result = {"direct": speeds(unary, streams, alone, alone)}
            for gateway in gateways[turn:] + gateways[:turn]:
                print(f"round {number + 1}: {gateway.name}", file=sys.stderr, flush=True)
                result[gateway.name] = self.measure(gateway, ports, alone)
        return {name: result[name] for name in ("direct", *(g.name for g in gateways))}

    def measure(self, gateway: Gateway, ports: list[int], alone: Figures) -> Figures:
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        with Running(gateway, urls, self.cores[2], self.scratch) as running:
            started_mb = running.rss_mb()
            unary, streams = self.throughput(running.port)
            self.client_busy = max(self.client_busy, unary["client_busy"], streams["client_busy"])
            loaded_mb = running.rss_mb()
            figures = speeds(unary, streams, self.one_client(running.port), alone)
            rate = SHARE * unary["per_s"]
            through = self.open_loop(running.port, rate)
        straight = self.open_loop(ports[0], rate)
        return figures | {
            "open p50 added ms": through["p50_ms"] - straight["p50_ms"],
            "open p99 added ms": through["p99_ms"] - straight["p99_ms"],
            "start s": running.start_s,
            "MB at start": started_mb,
            "MB loaded": loaded_mb,
        }

    def long_run(self, gateway: Gateway, requests: int, limit_s: float) -> Figures:
        """Memory over many requests, or over as many as take about `limit_s`."""
        print(f"long run: {gateway.name}", file=sys.stderr, flush=True)
        with self.upstream() as ports:
            urls = [f"http://127.0.0.1:{port}" for port in ports]
            with Running(gateway, urls, self.cores[2], self.scratch) as running:
                rates = (figures["per_s"] for figures in self.throughput(running.port))
                unary, streams = (max(1.0, rate) for rate in rates)
                per_s = 1 / (STREAMED / streams + (1 - STREAMED) / unary)
                segment = max(10, int(min(requests, per_s * limit_s) / SEGMENTS))
                streamed = max(1, int(segment * STREAMED))
                done, mb = [], []
                for i in range(SEGMENTS):
                    self.load(running.port, "--requests", streamed, "--warm-up", 0, "--stream")
                    self.load(running.port, "--requests", segment - streamed, "--warm-up", 0)
                    done.append((i + 1) * segment / 1000)
                    mb.append(running.rss_mb())
        half = SEGMENTS // 2
        slope = statistics.linear_regression(done[half:], mb[half:]).slope
        return {
            "requests of the long run": segment * SEGMENTS,
            "MB at the end": mb[-1],
            "KB per 1000 requests": slope * 1e3,
        }


def speeds(unary: Figures, streams: Figures, one: Figures, direct: Figures) -> Figures:
    return {
        "requests/s": unary["per_s"],
        "streams/s": streams["per_s"],
        "p50 ms": one["p50_ms"],
        "p50 added ms": one["p50_ms"] - direct["p50_ms"],
        "p99 added ms": one["p99_ms"] - direct["p99_ms"],
    }


def table(rounds: list[dict[str, Figures]], long: dict[str, Figures]) -> list[dict[str, Any]]:
    """A row a figure, a column a gateway."""
    columns = {
        name: {key: statistics.median(r[name][key] for r in rounds) for key in figures}
        | long.get(name, {})
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
