"""`octet rollout` against a real gateway: what it prints, its exit codes, its mistakes."""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any
from unittest.mock import patch

import pytest

from serve.config import GatewayConfig
from serve.gateway.state import Gateway
from serve.routing import Pool
from tests.command import octet
from tests.serve.conftest import serving_gateway
from tests.serve.judging import BODY, JUDGE, drawing, prove

KEY = "ok-admin"


@asynccontextmanager
async def gateway(
    tmp_path: Path, tilt: float = 0.0, reloading: asyncio.Lock | None = None
) -> AsyncIterator[Any]:
    """With clients without end, and a key for administration; yields its `octet rollout`.

    A reload is under way as long as `reloading` is locked.
    """
    model = {"pool": "main", "canary": [{"pool": "next", "fraction": 0.0}]}
    admin = {
        "sha256": hashlib.sha256(KEY.encode()).hexdigest(),
        "rollouts_file": str(tmp_path / "rollouts.json"),
    }
    quiet: dict[str, Any] = {"health": {"probe_after_s": None}}
    pools: dict[str, Any] = {"main": quiet, "ref": quiet, "next": quiet | {"judge": JUDGE}}
    config = GatewayConfig.model_validate(
        {"models": {"m": model}, "pools": pools, "admin": admin, "drain_timeout_s": 1}
    )
    backends = {"main": drawing(), "ref": drawing(), "next": drawing(tilt)}
    made = {name: Pool.of(name, [b], config.pools[name]) for name, b in backends.items()}
    rolled = Gateway(config, made)
    rolled.reloading = reloading or rolled.reloading
    async with serving_gateway(rolled) as served:
        prove(made["ref"])

        async def ask() -> None:
            while True:
                async with served.session.post(f"{served.url}/v1/completions", json=BODY) as reply:
                    assert reply.status == 200
                    await reply.read()

        async def run(*words: str) -> CompletedProcess[str]:
            command = ("rollout", *words, "--gateway", served.url)
            return await asyncio.to_thread(octet, *command)

        clients = asyncio.create_task(ask())
        yield run
        clients.cancel()
        await asyncio.gather(clients, return_exceptions=True)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("OCTET_ADMIN_KEY", KEY)
    # A command that runs in a thread cannot set the handlers of signals.
    with patch("octet_cli.rollout._POLL_S", 0.1), patch("signal.signal"):
        yield


async def test_a_good_canary_is_promoted_and_sent_back(tmp_path: Path) -> None:
    async with gateway(tmp_path) as run:
        done = await run("m", "next", "--steps", "0.5,1")
        assert (done.returncode, done.stderr) == (0, "")
        told = [line.partition("  ")[2] for line in done.stdout.splitlines()]
        assert told[0] == "next waits until a backend of the pool is proven and ready"
        assert told[1] == "next gets copies alone"
        assert told[-1] == "next is promoted: it gets all requests"
        again = await run("m", "next")
        assert again.returncode == 2 and "'next' is promoted already" in again.stderr
        back = await run("m", "--back")
        assert back.returncode == 0
        assert back.stdout.endswith("next rolled back: an administrator sent it back\n")


async def test_a_corrupted_canary_is_rolled_back_with_exit_code_1(tmp_path: Path) -> None:
    async with gateway(tmp_path, tilt=4.0) as run:
        done = await run("m", "next")
    assert done.returncode == 1
    assert "rolled back: it exceeds its limit: " in done.stdout
    assert done.stderr == "error: next is not promoted (rolled_back): it gets no requests\n"


async def test_a_reload_that_is_under_way_is_awaited(tmp_path: Path) -> None:
    lock, loop = asyncio.Lock(), asyncio.get_running_loop()
    sleep = time.sleep

    def sleep_and_end_the_reload(seconds: float) -> None:
        if lock.locked():
            loop.call_soon_threadsafe(lock.release)
        sleep(seconds)

    async with gateway(tmp_path, reloading=lock) as run:
        await lock.acquire()
        with patch("octet_cli.rollout.time.sleep", sleep_and_end_the_reload):
            done = await run("m", "next", "--steps", "1")
    assert (done.returncode, done.stderr) == (0, "")
    waits, *_, last = done.stdout.splitlines()
    assert waits.startswith("waits: the gateway is reloading its configuration")
    assert last.endswith("is promoted: it gets all requests")


async def test_mistakes_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway(tmp_path) as run:
        for words, message in (
            (("x", "next"), "no model 'x'"),
            (("m", "nxt"), "no canary of 'm' (its canaries: next)"),
            (("m", "next", "--steps", "0.5"), "the last should be 1"),
            (("m", "next", "--steps", "2,3"), "steps"),
            (("m", "--back"), "nothing to send back"),
        ):
            done = await run(*words)
            assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
            assert message in done.stderr
        monkeypatch.setenv("OCTET_ADMIN_KEY", "wrong")
        assert "administration needs its key" in (await run("m", "next")).stderr
        monkeypatch.setenv("OCTET_ADMIN_KEY", "two\nlines")
        done = await run("m", "next")
        assert done.returncode == 2 and "no HTTP header may have" in done.stderr
    done = octet("rollout", "m", "next", "--gateway", "http://[::1")
    assert (
        done.returncode == 2 and done.stderr == "error: --gateway http://[::1: Invalid IPv6 URL\n"
    )


def test_what_is_no_gateway_is_named() -> None:
    for url, message in (
        ("http://127.0.0.1:x", "no answer: nonnumeric port"),
        ("http://127.0.0.1:9", "is the gateway running there?"),
    ):
        done = octet("rollout", "m", "next", "--gateway", url)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert message in done.stderr


def test_a_rollout_that_another_one_followed_is_not_taken_for_it() -> None:
    """A second administrator may begin one between two looks."""
    event = {"at": "2026-11-27T00:00:00+00:00", "text": "gets copies alone"}
    states = [
        {"pool": pool, "began": began, "outcome": outcome, "reason": "", "events": [event]}
        for pool, began, outcome in (("a", "1", "running"), ("b", "2", "promoted"))
    ]
    with patch("octet_cli.rollout._call", side_effect=states):
        done = octet("rollout", "m", "a")
    assert done.returncode == 2
    assert "another rollout has begun, of b" in done.stderr
