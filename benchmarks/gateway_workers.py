"""One worker of Octet's gateway beside two, which share the limits of keys through Redis.

The requests, the upstream and the client are those of gateway_comparison.py. Two workers have two
cores. Where there are fewer than four, the upstream and the client need these cores, too: then
only the processor time of a request is compared, and from it what two cores could do.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from card import conditions, report
from gateway_bench import CLIENTS, Bench, Figures
from gateway_peers import Gateway, free_port, octet
from gateway_process import Running

WORKERS = (1, 2)
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
        gateways = {n: Gateway(f"workers-{n}", served(n, url)) for n in WORKERS}
        cores = {1: {bench.cores[2]}, 2: set(whole)}
        if separate:
            cores[2] = {bench.cores[2], next(c for c in whole if c not in bench.cores)}
        rounds = []
        for number in range(options.rounds):
            order = WORKERS if number % 2 == 0 else WORKERS[::-1]
            rounds.append({n: measure(bench, gateways[n], n, cores[n]) for n in order})
            print(f"round {number + 1}: {rounds[-1]}", file=sys.stderr, flush=True)
    card = conditions(
        **{**bench.card(list(gateways.values())), "workers": "1 and 2"},
        cores_of_two_workers=sorted(cores[2]),
        cores_are_their_own=separate,
        load_before=[round(load, 1) for load in os.getloadavg()],
        clients=CLIENTS,
        rounds=options.rounds,
        seconds_each=options.seconds,
        figures="medians of rounds; allowed/s: workers over the processor time of a request",
    )
    rows = []
    for key in rounds[0][1]:
        one, two = (statistics.median(r[n][key] for r in rounds) for n in WORKERS)
        rows.append({"figure": key, "one": one, "two": two, "ratio": two / one if one else None})
    report("gateway_workers", card, rows, options.output)
    key = "requests/s" if separate else "allowed/s"
    ratio = next(row["ratio"] for row in rows if row["figure"] == key)
    met = "met" if ratio >= AT_LEAST else "MISSED"
    print(f"{met}: {key} of two workers {ratio:.2f} times one's; wanted: {AT_LEAST:g} times")


def served(workers: int, redis: str) -> Callable[[list[str], int, Path], list[str]]:
    """Octet with everything on, limits shared through Redis, and so many workers."""
    alone = octet(access_log=False)

    def command(upstreams: list[str], port: int, scratch: Path) -> list[str]:
        words = alone(upstreams, port, scratch)
        file = scratch / "octet.yaml"
        config: dict[str, Any] = json.loads(file.read_text())
        config["access"]["shared"] = redis
        config["admin"] = {"port": free_port()}
        file.write_text(json.dumps(config))
        return [*words, "--workers", str(workers)]

    return command


def measure(bench: Bench, gateway: Gateway, workers: int, cores: set[int]) -> Figures:
    with bench.upstream() as ports:
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        with Running(gateway, urls, cores, bench.scratch) as running:
            admin_port = json.loads((bench.scratch / "octet.yaml").read_text())["admin"]["port"]
            for i in range(workers):
                wait_for(admin_port + i)
            bench.load(running.port, "--clients", CLIENTS, "--seconds", 1.0)  # warms all of them
            before = running.cpu_s_of()
            found = bench.load(
                running.port, "--clients", CLIENTS, "--seconds", bench.seconds, "--warm-up", 0
            )
            used = {pid: s - before.get(pid, 0.0) for pid, s in running.cpu_s_of().items()}
    busy = sorted(used.values())[-workers:]
    cpu_s = sum(used.values())
    return {
        "requests/s": found["per_s"],
        "cpu ms/request": 1000 * cpu_s / (found["per_s"] * bench.seconds),
        "allowed/s": len(busy) * found["per_s"] * bench.seconds / cpu_s,
        "least busy worker": busy[0] / cpu_s * len(busy),  # 1: all alike
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
