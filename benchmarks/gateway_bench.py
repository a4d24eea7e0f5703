"""Starts what the gateway benchmarks share: an upstream and a client on their cores."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gateway_load import PROMPT_CHARACTERS
from gateway_mock import CHUNKS
from gateway_peers import KEY, Gateway, version
from gateway_process import Running, cores

__all__ = ["CLIENTS", "Bench", "Figures"]

HERE = Path(__file__).parent
CLIENTS = 64

Figures = dict[str, float]
_SCHEDULERS = {os.SCHED_OTHER: "SCHED_OTHER", os.SCHED_FIFO: "SCHED_FIFO"}


class Bench:
    """The core of each process; `scratch` is a directory for configurations and logs."""

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

    def running(self, gateway: Gateway, ports: list[int]) -> Running:
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        return Running(gateway, urls, {self.cores[2]}, self.scratch)

    def load(self, port: int, *options: object) -> dict[str, Any]:
        """Returns what the client reports; a wrong answer ends the benchmark."""
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

    def card(self, gateways: list[Gateway]) -> dict[str, Any]:
        return {
            "gateways": sorted({version(gateway) for gateway in gateways}),
            "workers": 1,
            "scheduling": _SCHEDULERS.get(os.sched_getscheduler(0), "other"),
            "cores_used": dict(zip(("upstream", "client", "gateway"), self.cores, strict=True)),
            "upstream": f"answers at once; a stream is {CHUNKS} events, each written by itself",
            "request": f"chat completion, {PROMPT_CHARACTERS} characters, kept connections",
            "octet": "key with rates and quotas, admission by tokens, least_tokens over 2 "
            "backends, health checks, breaker, metrics; traces off",
        }
