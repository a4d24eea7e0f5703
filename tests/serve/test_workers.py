"""Tests `octet serve --workers`: one port, one limit, workers that are killed, and signals."""

import asyncio
import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from tests.command import octet
from tests.fake_servers import FakeOpenAI, running
from tests.serve.access.fake_redis import FakeRedis
from tests.serve.waiting import until

HEADERS = {"authorization": "Bearer octet-secret"}
BODY = {"model": "fake", "prompt": "x", "max_tokens": 2}


def configuration(**changes: Any) -> dict[str, Any]:
    """Of a gateway that workers can serve, but for `changes`; None removes a section."""
    digest = hashlib.sha256(b"octet-secret").hexdigest()
    backend = {"type": "openai", "url": "http://127.0.0.1:9"}
    whole = {
        "models": {"fake": {"pool": {"backends": [backend]}}},
        "access": {
            "keys": [{"name": "team", "sha256": digest, "requests_per_minute": 20}],
            "shared": "redis://127.0.0.1:9",
        },
        "admin": {"port": 0},
        **changes,
    }
    return {name: section for name, section in whole.items() if section is not None}


class Workers:
    """A running `octet serve --workers 2`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []
        self.url = ""
        self.administration: list[str] = []
        self.sent = 0  # requests
        self._served: list[tuple[float, float]] = []  # when each 200 was asked for, and had come

    async def read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            text = line.decode().rstrip()
            self.lines.append(text)
            if found := re.search(r"administration on (\S+)", text):
                self.administration.append(found[1])
            if found := re.search(r"serving .* on (\S+)", text):
                self.url = found[1]

    async def until(self, text: str, times: int = 1) -> None:
        async with asyncio.timeout(120):
            while sum(text in line for line in self.lines) < times:
                assert self.process.returncode is None, self.lines
                await asyncio.sleep(0.05)

    def pids(self) -> list[int]:
        found = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in found.split()]

    async def ask(self, count: int) -> list[int]:
        """The statuses of requests over a connection each.

        The fake Redis is in this process: while a busy machine stops it, workers refuse. Such a
        request is sent again.
        """
        statuses: list[int] = []
        while len(statuses) < count:
            asked = time.monotonic()
            async with (
                aiohttp.ClientSession(headers=HEADERS) as session,
                session.post(f"{self.url}/v1/completions", json=BODY) as answer,
            ):
                body = await answer.json()
            self.sent += 1
            if answer.status == 503:
                assert body["error"]["code"] == "shared_limits_unavailable"
                await asyncio.sleep(0.1)
                continue
            statuses.append(answer.status)
            if answer.status == 200:
                self._served.append((asked, time.monotonic()))
        return statuses

    def most_in_a_minute(self) -> int:
        """Counts the requests that were let through, in the 60 s that had most of them."""
        return max(
            sum(first <= asked and came < first + 60 for asked, came in self._served)
            for first, _ in self._served
        )


@asynccontextmanager
async def workers(path: Path, content: dict[str, Any]) -> AsyncIterator[Workers]:
    path.write_text(yaml.safe_dump(content))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "octet", "serve", "--config", str(path)),
        *("--port", "0", "--workers", "2"),
        stderr=subprocess.PIPE,
    )
    found = Workers(process)
    reading = asyncio.create_task(found.read())
    try:
        await found.until("serving fake on", times=2)
        yield found
    finally:
        pids = found.pids() if process.returncode is None else []
        for pid in (process.pid, *pids):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        await process.wait()
        await reading


async def until_gone(pid: int) -> None:
    async with asyncio.timeout(60):
        while Path(f"/proc/{pid}").exists():
            await asyncio.sleep(0.05)


@pytest.mark.skipif(sys.platform != "linux", reason="connections are spread only on Linux")
async def test_workers_share_a_port_and_a_limit_and_are_started_again(tmp_path: Path) -> None:
    async with FakeRedis() as redis, running(FakeOpenAI()) as backend:
        content = configuration()
        content["models"]["fake"]["pool"]["backends"][0]["url"] = backend.url
        content["access"]["shared"] = redis.url
        async with workers(tmp_path / "config.yaml", content) as found:
            statuses = await found.ask(60)
            assert statuses.count(200) == 20 and statuses.count(429) == 40
            served = []
            async with aiohttp.ClientSession() as session:
                for url in found.administration:
                    async with session.get(f"{url}/metrics") as answer:
                        text = await answer.text()
                    counts = re.findall(r"^octet_requests_total{.*} (\S+)$", text, re.M)
                    served.append(sum(map(float, counts)))
            assert len(served) == 2 and sum(served) == found.sent and min(served) > 0
            for worker in range(2):
                assert any(f"worker {worker}: serving fake on" in line for line in found.lines)
            content["access"]["keys"][0]["requests_per_minute"] = 25
            (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
            found.process.send_signal(signal.SIGHUP)
            await found.until("reloaded", times=2)
            await asyncio.sleep(0.3)  # a refusal stands for a moment
            assert (await found.ask(20)).count(200) == 5
            killed, other = found.pids()
            os.kill(killed, signal.SIGKILL)
            await found.until("worker 0 ended with code -9; it is started again")
            await found.until("serving fake on", times=3)
            assert set(await found.ask(20)) <= {200, 429}  # of the other, and of the new one
            assert found.most_in_a_minute() == 25
            assert other in found.pids() and len(found.pids()) == 2
            # A reload waits for a worker that is starting; one that cannot start is left out.
            os.kill(found.pids()[1], signal.SIGKILL)
            await found.until("it is started again in 1 s", times=2)
            await until(lambda: len(found.pids()) == 2)
            found.process.send_signal(signal.SIGHUP)
            await found.until("reloaded", times=4)
            (tmp_path / "config.yaml").write_text("models: {}")
            os.kill(found.pids()[0], signal.SIGKILL)
            await found.until("it is started again in 10 s")
            assert set(await found.ask(10)) <= {200, 429}
            assert found.most_in_a_minute() == 25
            pids = found.pids()
            found.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(60):
                assert await found.process.wait() == 0
            for pid in pids:
                await until_gone(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_workers_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    async with workers(tmp_path / "config.yaml", configuration(access=None)) as found:
        pids = found.pids()
        found.process.kill()
        for pid in pids:
            await until_gone(pid)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"admin": None}, "admin.port: missing: each worker has /status and /metrics of its own"),
        ({"admin": {"port": 65535}}, "admin.port: leaves no port for the last of 2 workers"),
        (
            {"access": configuration()["access"] | {"shared": None}},
            "access.shared: missing: each of 2 workers would give a key its whole limits",
        ),
        (
            {"access": {"shared": {"url": "redis://x", "when_lost": "share", "replicas": 1}}},
            "access.shared.replicas: is 1; count all 2 workers of each gateway",
        ),
        (
            {"models": {"m": {"pool": {"backends": [{"type": "embedded", "path": "there"}]}}}},
            "models.m.pool: --workers 2 would start its engine 2 times",
        ),
    ],
)
def test_what_several_processes_cannot_serve_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(configuration(**changes)))
    for how in (["--port", "0"], ["--check"]):
        result = octet("serve", "--config", path, "--workers", "2", *how)
        assert result.returncode == 2
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1 or how == ["--check"]
        assert message in result.stderr


def test_workers_are_for_a_configuration(tmp_path: Path) -> None:
    result = octet("serve", tmp_path, "--workers", "2")
    assert result.returncode == 2 and "--workers is for a configuration" in result.stderr
