"""One worker of Octet's gateway beside two, which share the limits of keys through Redis.

The requests, the upstream and the client are those of gateway_comparison.py. Two workers have two
cores. Where there are fewer than four, the upstream and the client take a part of these, so that
two workers can do more than is measured. On a busy machine the figures say nothing.

`apart` is what two cores allow at most: a gateway on each, with a client of its own, which share
no limits. A core that slows down because the other one is busy slows these down as well.

    python benchmarks/gateway_workers.py [--rounds N] [--output FILE]

Needs redis-server. What it checks: two workers on two cores do 1.8 times the requests of one.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from card import conditions, report
from gateway_bench import CLIENTS, Bench, Figures
from gateway_peers import Gateway, free_port, octet
from gateway_process import Running

CASES = ("one", "two", "apart")
AT_LEAST = 1.8
KEPT_FREE = 4  # cores from which on the client and the upstream have cores of their own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    whole = sorted(os.sched_getaffinity(0))
    separate = len(whole) >= KEPT_FREE
    with tempfile.TemporaryDirectory() as scratch, redis_server(Path(scratch)) as url:
        bench = Bench(options.seconds, Path(scratch))
        own = bench.cores[2]
        other = next(c for c in whole if c != own and not (separate and c in bench.cores))
        cases = {
            "one": [Part(1, {own}, url)],
            "two": [Part(2, {own, other}, url)],
            "apart": [Part(1, {own}), Part(1, {other})],
        }
        rounds = []
        for number in range(options.rounds):
            order = CASES if number % 2 == 0 else CASES[::-1]
            rounds.append({case: measure(bench, cases[case]) for case in order})
            print(f"round {number + 1}: {rounds[-1]}", file=sys.stderr, flush=True)
    card = conditions(
        **{**bench.card([cases["one"][0].gateway]), "workers": "1 and 2"},
        cores_of_two_workers=sorted({own, other}),
        cores_are_their_own=separate,
        load_before=[round(load, 1) for load in os.getloadavg()],
        clients=CLIENTS,
        rounds=options.rounds,
        seconds_each=options.seconds,
        figures="medians of rounds; allowed/s: workers over the processor time of a request",
    )
    medians = {
        case: {key: statistics.median(r[case][key] for r in rounds) for key in rounds[0][case]}
        for case in CASES
    }
    rows = [
        {"figure": key, **{case: medians[case][key] for case in CASES}} for key in medians["one"]
    ]
    report("gateway_workers", card, rows, options.output)
    one, two, apart = (medians[case]["requests/s"] for case in CASES)
    met = "met" if two / one >= AT_LEAST else "MISSED"
    print(
        f"{met}: requests/s of two workers {two / one:.2f} times one's, wanted: {AT_LEAST:g} times;"
        f" two gateways that share nothing: {apart / one:.2f} times"
    )


class Part:
    """A gateway with everything on, on its cores; `redis` shares its limits between workers."""

    def __init__(self, workers: int, cores: set[int], redis: str | None = None) -> None:
        self.workers = workers
        self.cores = cores
        self.admin_port = 0  # of the first worker, once it is started
        self._redis = redis
        self.gateway = Gateway(f"workers-{workers}-on-{'-'.join(map(str, cores))}", self._command)

    def _command(self, upstreams: list[str], port: int, scratch: Path) -> list[str]:
        words = octet(access_log=False)(upstreams, port, scratch)
        config: dict[str, Any] = json.loads((scratch / "octet.yaml").read_text())
        if self._redis:
            config["access"]["shared"] = self._redis
        self.admin_port = free_port()
        config["admin"] = {"port": self.admin_port}
        file = scratch / f"{self.gateway.name}.yaml"
        file.write_text(json.dumps(config))
        words[words.index("--config") + 1] = str(file)
        return [*words, "--workers", str(self.workers)]


def measure(bench: Bench, parts: Sequence[Part]) -> Figures:
    """Loads `parts` at once, each with its share of the clients."""
    with bench.upstream() as ports, ExitStack() as stack:
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        running = [
            stack.enter_context(Running(part.gateway, urls, part.cores, bench.scratch))
            for part in parts
        ]
        for part in parts:
            for worker in range(part.workers):
                wait_for(part.admin_port + worker)
        clients = CLIENTS // len(parts)

        def load(gateway: Running) -> tuple[float, list[float]]:
            bench.load(gateway.port, "--clients", clients, "--seconds", 1.0)  # warms all workers
            before = gateway.cpu_s_of()
            found = bench.load(
                gateway.port, "--clients", clients, "--seconds", bench.seconds, "--warm-up", 0
            )
            used = {pid: s - before.get(pid, 0.0) for pid, s in gateway.cpu_s_of().items()}
            return found["per_s"], list(used.values())

        with ThreadPoolExecutor(len(parts)) as pool:
            found = list(pool.map(load, running))
    workers = sum(part.workers for part in parts)
    per_s = sum(rate for rate, _ in found)
    used = sorted(s for _, each in found for s in each)
    cpu_s = sum(used)
    return {
        "requests/s": per_s,
        "cpu ms/request": 1000 * cpu_s / (per_s * bench.seconds),
        "allowed/s": workers * per_s * bench.seconds / cpu_s,
        "least busy worker": used[-workers] / cpu_s * workers,  # 1: all alike
    }


def wait_for(port: int) -> None:
    """Waits until something listens there."""
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise SystemExit(f"nothing listens on port {port}") from None
            time.sleep(0.05)


@contextmanager
def redis_server(scratch: Path) -> Iterator[str]:
    port = free_port()
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=scratch) as process:
        try:
            wait_for(port)
            yield f"redis://127.0.0.1:{port}"
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
