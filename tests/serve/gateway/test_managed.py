"""Backends that the gateway starts: supervision, restarts under load, and pools one at a time."""

import asyncio
import json
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from octet.errors import ConfigError, OctetError
from serve.backends.managed import ManagedBackend
from serve.check import check
from serve.config.checks import load_config
from serve.gateway.reload import reload_from
from serve.gateway.status import status as status_of
from serve.http.status_page import render
from serve.vllm import supervisor
from serve.vllm.command import Gpu
from tests.fake_servers.vllm_command import write_vllm
from tests.serve.conftest import Served, configured, serving_gateway
from tests.serve.process import members
from tests.serve.waiting import until

BODY = {"model": "m", "prompt": "abc", "max_tokens": 8, "ignore_eos": True}
QUICK = "health: {reconnect_s: 0.05, probe_after_s: null}"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delays of a test's length."""
    monkeypatch.setattr(supervisor, "_POLL_S", 0.05)
    monkeypatch.setattr(supervisor, "_DELAYS_S", (0.05, 0.2))
    monkeypatch.setattr(supervisor, "_DEAD_S", 0.3)


@pytest.fixture
def entry(tmp_path: Path) -> Callable[..., str]:
    """A managed backend in a configuration, whose vLLM is started with `options`."""
    command = write_vllm(tmp_path / "vllm")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")

    def entry(*options: str, **more: Any) -> str:
        words = ", ".join(f'"{option}"' for option in options)
        extra = "".join(f", {name}: {value}" for name, value in more.items())
        return (
            f"{{type: vllm, artifact: model, command: {command}, name: own,"
            f" options: [{words}]{extra}}}"
        )

    return entry


@asynccontextmanager
async def gateway_of(path: Path, text: str) -> AsyncIterator[Served]:
    async with serving_gateway(configured(path / "octet.yaml", text)) as served:
        yield served


def one(entry: str) -> str:
    return f"models: {{m: {{pool: p}}}}\npools: {{p: {{backends: [{entry}], {QUICK}}}}}\n"


def backend_of(served: Served, pool: str = "p") -> ManagedBackend:
    (member,) = served.gateway.pools[pool].members
    assert isinstance(member.backend, ManagedBackend)
    return member.backend


def process_of(served: Served) -> dict[str, Any]:
    return backend_of(served).process


def alive(pid: int) -> bool:
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


async def test_a_killed_process_is_replaced_and_no_request_without_a_token_is_lost(
    tmp_path: Path, entry: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    hold = tmp_path / "hold"
    async with gateway_of(tmp_path, one(entry("--engine", "--hold", str(hold)))) as served:
        assert (await served.post("/v1/completions", BODY))[0] == 200  # it waits for the start
        before = process_of(served)["pid"]
        hold.touch()
        answers = [asyncio.create_task(served.post("/v1/completions", BODY)) for _ in range(40)]
        await until(lambda: served.gateway.pools["p"].members[0].in_flight == 40)
        os.kill(before, signal.SIGKILL)  # and not its engine
        hold.unlink()
        found = await asyncio.gather(*answers)
        assert [body for status, body in found if status != 200] == []
        process = process_of(served)
        assert process["starts"] == 2 and process["pid"] != before
        assert process["last_end"].startswith("was killed by SIGKILL: INFO starting serve")
    await until(lambda: not members(before) and not members(process["pid"]))
    lines = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("own | INFO starting serve") for line in lines)


async def test_one_whose_engine_is_dead_is_replaced(
    tmp_path: Path, entry: Callable[..., str]
) -> None:
    async with gateway_of(tmp_path, one(entry("--dead-after", "0.5"))) as served:
        assert (await served.post("/v1/completions", BODY))[0] == 200
        await until(lambda: process_of(served)["starts"] > 1)
        assert "EngineDeadError: the engine is gone" in process_of(served)["last_end"]


@pytest.mark.parametrize(
    ("options", "more", "reason"),
    [
        (["--broken"], {}, "ended with code 1: ValueError: no kernel can run this"),
        (["--hang"], {"start_timeout_s": 1.5}, "was not ready within 1.5 s"),
    ],
)
async def test_one_that_does_not_start_is_tried_again_and_refuses_requests(
    options: list[str], more: dict[str, Any], reason: str, tmp_path: Path, entry: Callable[..., str]
) -> None:
    async with gateway_of(tmp_path, one(entry(*options, **more))) as served:
        status, body = await served.post("/v1/completions", BODY)
        assert status == 503, body
        assert reason in backend_of(served).gave_up
        await until(lambda: process_of(served)["starts"] > 1)
        shown = status_of(served.gateway, addresses=True)["pools"]["p"]["backends"][0]
        assert reason in shown["process"]["last_end"]


async def test_a_rollout_of_one_that_does_not_start_ends_with_the_cause(
    tmp_path: Path, entry: Callable[..., str]
) -> None:
    """Not when the time of its step is over, an hour later."""
    text = (
        "models: {m: {pool: p, canary: [{pool: next, fraction: 0}]}}\n"
        "admin: {sha256: " + "a" * 64 + ", rollouts_file: rollouts.json}\n"
        f"pools:\n  p: {{backends: [{entry()}], {QUICK}}}\n"
        f"  next: {{backends: [{entry('--broken').replace('own', 'new')}], {QUICK},"
        " judge: {reference: p, max_kl: 0.1}}\n"
    )
    async with gateway_of(tmp_path, text) as served:
        rollouts = served.gateway.rollouts
        rollouts.start("m", "next", [1.0], 3600.0)
        await until(lambda: rollouts.state("m")["outcome"] != "running")
        assert rollouts.state("m")["outcome"] == "rolled_back"
        reason = rollouts.state("m")["reason"]
        assert reason.startswith("it does not start: vLLM ended with code 1: ValueError: no kernel")


async def test_it_ends_when_a_reload_removes_it(tmp_path: Path, entry: Callable[..., str]) -> None:
    async with gateway_of(tmp_path, one(entry())) as served:
        assert (await served.post("/v1/completions", BODY))[0] == 200
        pid = process_of(served)["pid"]
        path = tmp_path / "octet.yaml"
        path.write_text(one("{type: vllm, url: 'http://127.0.0.1:9'}"))
        await reload_from(served.gateway, path)
        await until(lambda: not alive(pid))


async def test_one_that_can_never_start_is_refused(
    tmp_path: Path, entry: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = one(entry().replace(str(tmp_path / "vllm"), "no-such-vllm"))
    gateway = configured(tmp_path / "octet.yaml", text)
    with pytest.raises(ConfigError, match="no-such-vllm: no such command, so nothing can run vLLM"):
        await gateway.start()
    gateway = configured(tmp_path / "octet.yaml", one(entry()))
    full = SimpleNamespace(free=100 << 20)
    monkeypatch.setattr("serve.backends.managed.shutil.disk_usage", lambda path: full)
    with pytest.raises(ConfigError, match="100 MB are free, and vLLM's kernel caches may take"):
        await gateway.start()
    with pytest.raises(ConfigError, match=r"no checkpoint \(no config.json\)"):
        configured(tmp_path / "octet.yaml", one(entry().replace("model,", "nothing,")))


async def test_requests_that_queue_wait_for_the_start_too(
    tmp_path: Path, entry: Callable[..., str]
) -> None:
    """And then for as long as a queue may last: one request is served at a time here."""
    late = tmp_path / "late"
    late.touch()
    admission = f"{QUICK}, admission: {{max_tokens: 12, max_wait_s: 1.5}}"
    text = one(entry("--late", str(late))).replace(QUICK, admission)
    async with gateway_of(tmp_path, text) as served:
        answers = [asyncio.create_task(served.post("/v1/completions", BODY)) for _ in range(4)]
        await asyncio.sleep(1.8)
        assert served.gateway.admission.status()["pools"]["p"]["queued_requests"] == 3
        late.unlink()
        assert [status for status, _ in await asyncio.gather(*answers)] == 4 * [200]
        assert not served.gateway.admission.rejections


async def test_more_requests_than_it_takes_at_once_wait_for_the_start(
    tmp_path: Path, entry: Callable[..., str]
) -> None:
    late = tmp_path / "late"
    late.touch()
    async with gateway_of(tmp_path, one(entry("--late", str(late), max_in_flight=1))) as served:
        answers = [asyncio.create_task(served.post("/v1/completions", BODY)) for _ in range(3)]
        await until(lambda: served.gateway.running == 3)
        late.unlink()
        assert [status for status, _ in await asyncio.gather(*answers)] == 3 * [200]


async def test_a_drain_that_is_over_ends_the_wait_for_a_start(
    tmp_path: Path, entry: Callable[..., str]
) -> None:
    text = one(entry("--hang")).replace(QUICK, f"{QUICK}, admission: {{max_tokens: 12}}")
    text += "drain_timeout_s: 0.2\n"
    async with gateway_of(tmp_path, text) as served:
        answers = [asyncio.create_task(served.post("/v1/completions", BODY)) for _ in range(2)]
        await until(lambda: served.gateway.running == 2)  # one waits in the queue
        served.server.handle_exit(signal.SIGTERM, None)
        for status, body in await asyncio.gather(*answers):
            assert (status, body["error"]["code"]) == (503, "draining"), body


async def test_each_start_after_a_failed_one_takes_the_memory_that_is_free(
    tmp_path: Path,
    entry: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What used the GPU, such as the vLLM that a reload replaces, may have ended meanwhile."""
    free = iter([10, 100])
    monkeypatch.setattr(
        "serve.backends.managed.gpus_at_rest",
        lambda: [Gpu("H200", (9, 0), memory=100, free=next(free, 50))],
    )
    caplog.set_level(logging.INFO)
    breaks = tmp_path / "breaks"
    breaks.touch()
    async with gateway_of(tmp_path, one(entry("--broken-by", str(breaks)))) as served:
        await until(lambda: process_of(served)["last_end"])
        breaks.unlink()
        await until(lambda: served.gateway.pools["p"].ready)
        os.kill(process_of(served)["pid"], signal.SIGKILL)
        assert (await served.post("/v1/completions", BODY))[0] == 200
    starts = [line for line in caplog.messages if line.startswith("own: starting ")]
    assert ["--gpu-memory-utilization 0.08" in line for line in starts] == [True, False, False]


async def test_one_that_serves_after_failures_is_waited_for_when_it_is_killed(
    tmp_path: Path, entry: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_LASTED_S", 0.2)
    breaks = tmp_path / "breaks"
    async with gateway_of(tmp_path, one(entry("--broken-by", str(breaks)))) as served:
        assert (await served.post("/v1/completions", BODY))[0] == 200
        backend = backend_of(served)
        breaks.touch()
        os.kill(process_of(served)["pid"], signal.SIGKILL)
        await until(lambda: backend.gave_up)  # as it has ended three times
        breaks.unlink()
        await until(lambda: not backend.gave_up)
        assert (await served.post("/v1/completions", BODY))[0] == 200


def chain(*entries: str) -> str:
    names = ["first", "second", "third"][: len(entries)]
    pools = "".join(
        f"  {name}: {{backends: [{entry}], {QUICK}}}\n"
        for name, entry in zip(names, entries, strict=True)
    )
    others = ", ".join(names[1:])
    model = f"{{pool: first, fallback: [{others}], one_at_a_time: true}}"
    return f"models: {{m: {model}}}\npools:\n{pools}"


async def test_pools_start_one_at_a_time_until_one_serves(
    tmp_path: Path, entry: Callable[..., str]
) -> None:
    missing = entry().replace(str(tmp_path / "vllm"), "no-such-vllm")
    text = chain(entry("--broken"), missing, entry())
    async with gateway_of(tmp_path, text) as served:
        async with served.session.post("/v1/completions", json=BODY) as answer:  # it waits
            assert answer.status == 200
            reasons = "third; first does_not_start, second does_not_start"
            assert answer.headers["x-octet-fallback"] == reasons
        pools = status_of(served.gateway, addresses=True)["pools"]
        assert [pool["phase"] for pool in pools.values()] == ["given_up", "given_up", "started"]
        assert "no kernel can run this" in pools["first"]["given_up_because"]
        assert "no such command" in pools["second"]["given_up_because"]
        sample = served.gateway.metrics.registry.get_sample_value
        labels = {"pool": "first", "reason": "does_not_start"}
        assert sample("octet_pool_given_up", labels) == 1
        assert sample("octet_pool_given_up", labels | {"pool": "third"}) is None
        assert not served.gateway.pools["first"].members
        page = render(status_of(served.gateway))
        assert "Pool first" in page and "was given up, and the next one started" in page


async def test_an_error_is_that_of_the_pool_that_serves(
    tmp_path: Path, entry: Callable[..., str]
) -> None:
    """Not that a pool has no backends, which is stopped or not started yet."""
    hold = tmp_path / "hold"
    text = chain(entry("--hold", str(hold)), entry())
    text = text.replace(QUICK, f"{QUICK}, admission: {{max_tokens: 12, max_queue: 0}}")
    async with gateway_of(tmp_path, text) as served:
        assert (await served.post("/v1/completions", BODY))[0] == 200
        hold.touch()
        held = asyncio.create_task(served.post("/v1/completions", BODY))
        await until(lambda: served.gateway.running)
        async with served.session.post("/v1/completions", json=BODY) as answer:
            assert answer.status == 503
            assert "the queue of 'first' is full" in (await answer.json())["error"]["message"]
            assert int(answer.headers["retry-after"]) < 10
        hold.unlink()
        assert (await held)[0] == 200


async def test_the_first_pool_that_serves_is_the_only_one_that_starts(
    tmp_path: Path, entry: Callable[..., str]
) -> None:
    text = chain(entry(), entry())
    (tmp_path / "octet.yaml").write_text(text)
    line = "pool second, least_tokens: 1 backend, started one pool at a time"
    assert line in check(tmp_path / "octet.yaml")
    async with gateway_of(tmp_path, text) as served:
        async with served.session.post("/v1/completions", json=BODY) as answer:
            assert answer.status == 200 and "x-octet-fallback" not in answer.headers
        assert served.gateway.pools["second"].phase == "dormant"
        pid = backend_of(served, "first").process["pid"]
        await reload_from(served.gateway, tmp_path / "octet.yaml")  # changes nothing
        assert backend_of(served, "first").process["pid"] == pid
        (tmp_path / "octet.yaml").write_text(chain(entry("--slow", "1"), entry()))
        with pytest.raises(OctetError, match="only by a restart"):
            await reload_from(served.gateway, tmp_path / "octet.yaml")


def test_a_model_that_starts_one_pool_at_a_time_shares_none(
    tmp_path: Path, entry: Callable[..., str]
) -> None:
    path = tmp_path / "octet.yaml"
    for old, new, problem in (
        (", fallback: [second]", "", "needs a `fallback`"),
        ("}}\npools", "}, n: {pool: second}}\npools", "the pool 'second' is also used by n"),
    ):
        text = chain(entry(), entry())
        assert old in text
        path.write_text(text.replace(old, new))
        with pytest.raises(ConfigError, match=problem):
            load_config(path)


async def test_hopper_keeps_the_scales_of_blocks_and_a_user_may_not(
    tmp_path: Path, entry: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    section = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "model" / "config.json").write_text(json.dumps({"quantization_config": section}))
    hopper = [Gpu("H200", (9, 0), 143_771, 143_000)]
    for name in ("gpus", "gpus_at_rest"):
        monkeypatch.setattr(f"serve.backends.managed.{name}", lambda *_: hopper)
    name = "VLLM_USE_DEEP_GEMM_E8M0"
    for mine, expected in ({}, "0"), ({"environment": f'{{{name}: "1"}}'}, "1"):
        async with gateway_of(tmp_path, one(entry(**mine))) as served:
            await until(lambda: process_of(served)["pid"])
            variables = Path(f"/proc/{process_of(served)['pid']}/environ").read_bytes()
        assert f"{name}={expected}".encode() in variables.split(b"\0")
