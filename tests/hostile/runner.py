"""Runs the cases against a gateway in a process of its own, and checks the same of each.

Per case: it ends in time, and the client gets a JSON error object, or the explicit end of a stream.
Over all cases: no traceback in the log, /health answers, memory is bounded, nothing is left in
flight, and requests to another pool are served.
"""

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.hostile.clients import Case
from tests.hostile.upstreams import Scenario, Upstream, playing
from tests.layout import ROOT
from tests.serve.process import octet_serve
from tests.serve.upstreams import JSON_HEAD, scripted, send, whole

__all__ = ["MOST_HEALTH_S", "Gateway", "against"]

MOST_S = 10.0  # for a case; its deadlines are shorter
MOST_HEALTH_S = 0.1
MOST_GROWTH = 400 * 1024 * 1024  # bytes of memory
AT_ONCE = 8
QUIET_S = 4.0  # after so long without a byte, a client takes its connection for idle
POOL = (
    "{{proof: {{enabled: false}}, timeouts: {{first_token_s: 1, inter_token_s: 1, total_s: 4}}, "
    "ejection: {{failures: 1000000}}, health: {{probe_after_s: null, interval_s: 0.2, "
    "load_interval_s: 0.2}}, backends: [{{type: vllm, url: '{url}', model: m}}]}}"
)
CONFIG = """
models: {{hostile: {{pool: hostile}}, sound: {{pool: sound}}}}
pools:
  hostile: {hostile}
  sound: {sound}
limits: {{max_answer_bytes: 2000000, max_body_bytes: 2000000, read_timeout_s: 2}}
"""
ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9},
}
ENDS = (b"[DONE]", b'"message_stop"', b'"response.completed"', b'"response.failed"')


@dataclass
class Gateway:
    """The gateway under attack, and what it did wrong."""

    port: int
    pid: int
    upstream: Upstream
    session: aiohttp.ClientSession
    log: list[str]
    violations: list[str] = field(default_factory=list)
    slowest_health_s: float = 0.0
    peak_bytes: int = 0

    @property
    def failed(self) -> bool:
        return bool(self.violations) or any(line.startswith("Traceback") for line in self.log)

    async def play(self, cases: "dict[str, Scenario] | list[Case]") -> None:
        """Runs the cases, some of them at once, with requests to the sound pool in between."""
        places = asyncio.Semaphore(AT_ONCE)

        async def one(name: str, case: Scenario | Case) -> None:
            async with places:
                try:
                    async with asyncio.timeout(MOST_S):
                        wrong = await (
                            self._ask(name, case)
                            if isinstance(case, Scenario)
                            else self._attack(case)
                        )
                except TimeoutError:
                    wrong = f"not over within {MOST_S} s"
                if wrong:
                    self.violations.append(f"{case.name}: {wrong}")

        named = cases.items() if isinstance(cases, dict) else ((c.name, c) for c in cases)
        watching = asyncio.create_task(self._use_the_other_pool())
        try:
            await asyncio.gather(*(one(name, case) for name, case in named))
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching

    async def _ask(self, name: str, scenario: Scenario) -> str:
        """Sends a request that the upstream answers with `scenario`; returns what is wrong."""
        body: dict[str, Any] = {"model": "hostile", **ASKED[scenario.path]}
        if scenario.stream:
            body |= {"stream": True}
        if scenario.counted:
            body |= {"stream_options": {"include_usage": True}}
        headers = {"x-request-id": name}
        try:
            async with self.session.post(scenario.path, json=body, headers=headers) as response:
                content = await response.read()
        except aiohttp.ClientError as error:
            return f"no answer: {error!r}"
        return wrong_with(response.status, response.headers.get("content-type", ""), content)

    async def _attack(self, case: Case) -> str:
        """Sends the bytes of `case`; returns what is wrong with the answers."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        received = bytearray()

        async def write() -> None:
            with suppress(OSError):
                if not case.pause_s:
                    writer.write(case.sent)
                for byte in case.sent if case.pause_s else b"":
                    writer.write(bytes([byte]))
                    await asyncio.sleep(case.pause_s)
                await writer.drain()

        writing = asyncio.create_task(write())
        try:
            with suppress(TimeoutError, OSError):
                async with asyncio.timeout(QUIET_S) as quiet:
                    while piece := await reader.read(65536):
                        received += piece
                        quiet.reschedule(asyncio.get_running_loop().time() + QUIET_S)
        finally:
            writing.cancel()
            writer.transport.abort()
        return wrong_in(bytes(received), heads_only=b"HEAD" in case.sent)

    async def _use_the_other_pool(self) -> None:
        while True:
            body = {"model": "sound", "prompt": "x"}
            async with self.session.post("/v1/completions", json=body) as response:
                content = await response.read()
                if response.status != 200:
                    self.violations.append(f"the other pool: {response.status} {content[:200]!r}")
            await asyncio.sleep(0.02)

    async def settled(self) -> None:
        """Checks that nothing is left in flight, and what the whole run did to the process."""
        for _ in range(100):
            held = await self._held()
            if not held:
                break
            await asyncio.sleep(0.1)
        else:
            self.violations.append(f"still held: {held}")
        for i, line in enumerate(self.log):
            if line.startswith("Traceback"):
                before = self.log[max(i - 1, 0)]  # it has the id of the request, so of its scenario
                self.violations.append(f"{before}{''.join(self.log[i : i + 40])}")

    async def _held(self) -> dict[str, float]:
        async with self.session.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        gauges = [line for line in lines if line.startswith("octet_requests_in_flight{")]
        held = {
            line: value
            for line in gauges
            if (value := float(line.split()[-1]))
            and '"/metrics"' not in line
            and "/health" not in line
        }
        async with self.session.get("/status") as response:
            pools = (await response.json())["pools"]
        for pool in pools.values():
            for backend in pool["backends"]:
                for key in ("in_flight", "outstanding_tokens"):
                    if backend[key]:
                        held[f"{backend['name']} {key}"] = backend[key]
        return held


def wrong_with(status: int, kind: str, content: bytes) -> str:
    """Returns what is wrong with an answer, or nothing."""
    if not 100 <= status < 600:
        return f"status {status}"
    if kind.startswith("text/event-stream"):
        events = [
            event for event in content.replace(b"\r\n", b"\n").split(b"\n\n") if event.strip()
        ]
        if not events:
            return "a stream without an event"
        last = events[-1]
        if any(end in last for end in ENDS):
            return ""
        return "" if b'"error"' in last else f"the stream ends with {last[-100:]!r}"
    if status < 400:
        return "" if content or status in (204, 304) else "an empty answer"
    try:
        error = json.loads(content)["error"]
        sound = isinstance(error["message"], str) and kind == "application/json"
    except (ValueError, LookupError, TypeError):
        sound = False
    return "" if sound else f"{status}, {kind}: no error object but {content[:100]!r}"


def wrong_in(received: bytes, *, heads_only: bool) -> str:
    """Returns what is wrong in the bytes of several answers, or nothing."""
    while received:
        head, blank, rest = received.partition(b"\r\n\r\n")
        words = head.split(b" ", 2)
        if not blank or not head.startswith(b"HTTP/1.1 ") or not words[1].isdigit():
            return f"no answer of HTTP but {received[:100]!r}"
        status = int(words[1])
        fields = dict(
            line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line
        )
        if status < 200:
            received = rest
            continue
        if fields.get(b"transfer-encoding") == b"chunked":
            body, received = unchunked(rest)
        else:
            size = int(fields.get(b"content-length", b"0"))
            body, received = rest[:size], rest[size:]
            if len(body) < size:
                return "" if heads_only else f"{status}: the body is cut off"
        if heads_only and not body:
            continue
        if wrong := wrong_with(status, fields.get(b"content-type", b"").decode(), body):
            return wrong
    return ""


def unchunked(data: bytes) -> tuple[bytes, bytes]:
    body = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        count = int(size, 16)
        body, data = body + data[:count], data[count + 2 :]
        if count == 0:
            break
    return body, data


@asynccontextmanager
async def against(directory: Path) -> AsyncIterator[Gateway]:
    """Starts the gateway, its upstreams and the monitor; after the cases, checks the process."""
    async with playing() as upstream, scripted(send(JSON_HEAD, whole())) as sound:
        config = directory / "octet.yaml"
        pools = {"hostile": POOL.format(url=upstream.url), "sound": POOL.format(url=sound.url)}
        config.write_text(CONFIG.format(**pools))
        with octet_serve(config) as process:
            assert process.stderr is not None
            log: list[str] = []
            while not log or "serving" not in log[-1]:
                log.append(await asyncio.to_thread(process.stderr.readline))
                assert log[-1], f"it ended: {log}"
            url = log[-1].split()[-1]
            reading = threading.Thread(target=log.extend, args=(process.stderr,), daemon=True)
            reading.start()
            port = int(url.rpartition(":")[2])
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(url, connector=connector) as session:
                gateway = Gateway(port, process.pid, upstream, session, log)
                before = _memory(process.pid)
                monitor = _monitor(port, process.pid)
                try:
                    yield gateway
                    await gateway.settled()
                finally:
                    output, problem = await asyncio.to_thread(monitor.communicate)
            if monitor.returncode:
                gateway.violations.append(f"/health: {problem.strip().splitlines()[-1]}")
            else:
                gateway.slowest_health_s = json.loads(output)["slowest_s"]
            gateway.peak_bytes = _memory(process.pid)
            if gateway.peak_bytes - before > MOST_GROWTH:
                gateway.violations.append(f"memory: {before} bytes grew to {gateway.peak_bytes}")


def _monitor(port: int, pid: int) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "tests.hostile.monitor", str(port), str(pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def _memory(pid: int) -> int:
    """Returns the largest resident size that the process has had, in bytes; 0 if not on Linux."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0
