"""The load of the gateway benchmarks: a client on raw sockets, cheap enough not to be measured.

Closed loop: each of N clients sends its next request when it has its answer. Open loop: requests
leave at the times of a Poisson process, whether or not earlier ones were answered, and latency
counts from the time a request was due, so that a server that falls behind cannot hide it
("coordinated omission"). Connections are kept. Every answer is read to its end and looked into.

    python benchmarks/gateway_load.py --port P --clients 64 --seconds 3 [--stream] [--rate R]

prints one JSON object; latencies in ms.
"""

import argparse
import ctypes
import gc
import json
import os
import random
import re
import select
import socket
import statistics
import time
from collections import deque
from typing import Any

from gateway_mock import CHUNKS, MODEL, WORDS

__all__ = ["request_bytes"]

PROMPT_CHARACTERS = 1024
PR_SET_TIMERSLACK = 29
STALL_S = 20.0  # nothing answered for so long: give up
MAX_ERRORS = 100
MAX_CONNECTIONS = 1024
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
FIRST, LAST = WORDS[0].strip().encode(), WORDS[-1].strip().encode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--warm-up", type=float, default=0.5, help="seconds, not counted")
    parser.add_argument("--requests", type=int, help="stop after so many, not after a time")
    parser.add_argument("--rate", type=float, help="open loop: requests per second")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--core", type=int)
    parser.add_argument("--key")
    options = parser.parse_args()
    if options.core is not None:
        os.sched_setaffinity(0, {options.core})
    load = Load(options.port, request_bytes(options.stream, options.key), options.stream)
    gc.disable()
    if options.rate:
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1)  # nanosecond; else sleeps are 50 us too long
        load.open_loop(options.clients, options.rate, options.seconds)
    else:
        load.closed_loop(options.clients, options.warm_up, options.seconds, options.requests)
    print(json.dumps(load.figures()))


def request_bytes(stream: bool, key: str | None) -> bytes:
    prompt = ("All work and no play makes Jack a dull boy. " * 100)[:PROMPT_CHARACTERS]
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": CHUNKS,
        "temperature": 0.0,
    }
    if stream:
        body["stream"] = True
    data = json.dumps(body).encode()
    head = [
        "POST /v1/chat/completions HTTP/1.1",
        "host: 127.0.0.1",
        "accept: */*",
        "user-agent: gateway-load",
        "content-type: application/json",
        f"content-length: {len(data)}",
    ]
    if key:
        head.append(f"authorization: Bearer {key}")
    return "\r\n".join(head).encode() + b"\r\n\r\n" + data


class Connection:
    """One client's socket, with the answer that is being read."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.buffer = b""
        self.end: int | None = None  # of the answer in `buffer`; -1: it is chunked
        self.started = 0.0
        self.busy = False

    def send(self, request: bytes, started: float) -> None:
        self.buffer, self.end, self.started, self.busy = b"", None, started, True
        self.socket.sendall(request)

    def receive(self) -> bool:
        """Reads what there is; true at the end of an answer. Raises ConnectionError if it broke."""
        data = self.socket.recv(262144)
        if not data:
            raise ConnectionError("closed by the server")
        buffer = self.buffer = self.buffer + data if self.buffer else data
        if self.end is None:
            head = buffer.find(b"\r\n\r\n")
            if head < 0:
                return False
            found = LENGTH.search(buffer, 0, head)
            self.end = head + 4 + int(found[1]) if found else -1
        return buffer.endswith(b"\r\n0\r\n\r\n") if self.end < 0 else len(buffer) >= self.end


class Load:
    def __init__(self, port: int, request: bytes, stream: bool) -> None:
        self.port = port
        self.request = request
        self.stream = stream
        self.latencies: list[float] = []  # seconds
        self.errors = 0
        self.example = ""
        self.epoll = select.epoll()
        self.connections: dict[int, Connection] = {}
        self.wall_s = self.cpu_s = 0.0

    def connect(self) -> Connection:
        connection = Connection(self.port)
        self.connections[connection.socket.fileno()] = connection
        self.epoll.register(connection.socket.fileno(), select.EPOLLIN)
        return connection

    def ended(self, fileno: int) -> Connection | None:
        """The connection at `fileno`, if its answer is now complete; a broken one is replaced."""
        connection = self.connections[fileno]
        try:
            if not connection.receive():
                return None
        except OSError as error:
            self.fail(str(error))
            self.epoll.unregister(fileno)
            connection.socket.close()
            del self.connections[fileno]
            return self.connect()
        connection.busy = False
        answer = connection.buffer
        whole = LAST in answer and (not self.stream or (FIRST in answer and b"[DONE]" in answer))
        if not (answer.startswith(b"HTTP/1.1 200") and whole):
            self.fail(answer[:400].decode(errors="replace"))
        return connection

    def fail(self, what: str) -> None:
        self.errors += 1
        self.example = self.example or what
        if self.errors >= MAX_ERRORS:
            raise SystemExit(f"{self.errors} errors, such as: {self.example}")

    def closed_loop(
        self, clients: int, warm_up_s: float, seconds: float, requests: int | None
    ) -> None:
        for _ in range(clients):
            self.connect().send(self.request, time.perf_counter())
        begin = time.perf_counter() + warm_up_s
        stop = begin + seconds if requests is None else float("inf")
        cpu = time.process_time()
        counting = False
        while True:
            events = self.epoll.poll(STALL_S)
            now = time.perf_counter()
            if not events:
                self.fail(f"nothing answered for {STALL_S:g} s")
                break
            if not counting and now >= begin:
                counting, begin, cpu = True, now, time.process_time()
                self.latencies.clear()
            if now >= stop or (requests is not None and len(self.latencies) >= requests):
                break
            for fileno, _ in events:
                connection = self.ended(fileno)
                if connection is None:
                    continue
                now = time.perf_counter()
                if connection.started:
                    self.latencies.append(now - connection.started)
                connection.send(self.request, now)
        self.wall_s = time.perf_counter() - begin
        self.cpu_s = time.process_time() - cpu

    def open_loop(self, connections: int, rate: float, seconds: float) -> None:
        """Starts with `connections`, each used once; more are opened when none is idle.

        Beyond MAX_CONNECTIONS a request waits for one: its latency counts all the same.
        """
        idle: deque[Connection] = deque()
        for _ in range(connections):
            connection = self.connect()
            connection.send(self.request, 0.0)
            idle.append(connection)
        waiting = connections
        while waiting:
            for fileno, _ in self.epoll.poll(STALL_S):
                waiting -= self.ended(fileno) is not None
        draw = random.Random(0)
        begin = due = time.perf_counter() + 0.05
        stop = begin + seconds
        cpu = time.process_time()
        in_flight = 0
        while due < stop or in_flight:
            now = time.perf_counter()
            while due <= now and due < stop:
                if not idle and len(self.connections) >= MAX_CONNECTIONS:
                    break
                connection = idle.popleft() if idle else self.connect()
                connection.send(self.request, due)
                in_flight += 1
                due += draw.expovariate(rate)
            gap = due - now if due < stop else 1.0
            if now > stop + STALL_S:
                self.fail(f"{in_flight} requests unanswered {STALL_S:g} s after the last was sent")
                break
            # epoll's own timeout has whole milliseconds, select's has microseconds. Not a spin: it
            # would keep the core from an upstream that shares it.
            if gap > 0:
                select.select([self.epoll], [], [], gap)
            events = self.epoll.poll(0)
            for fileno, _ in events:
                ended = self.ended(fileno)
                if ended is None:
                    continue
                if ended.started:
                    self.latencies.append(time.perf_counter() - ended.started)
                in_flight -= 1
                idle.append(ended)
        self.wall_s = time.perf_counter() - begin
        self.cpu_s = time.process_time() - cpu

    def figures(self) -> dict[str, Any]:
        done = len(self.latencies)
        cuts = statistics.quantiles(self.latencies, n=1000) if done > 1 else [float("nan")] * 999
        return {
            "requests": done,
            "errors": self.errors,
            "example": self.example,
            "per_s": done / self.wall_s,
            "p50_ms": cuts[499] * 1e3,
            "p99_ms": cuts[989] * 1e3,
            "client_busy": self.cpu_s / self.wall_s,
        }


if __name__ == "__main__":
    main()
