"""A new configuration while requests run: whole or not at all, and nothing is lost."""

import asyncio
import hashlib
import json
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from octet.errors import OctetError, RequestError
from serve.backends.openai_http import OpenAiHttpBackend
from serve.config import GatewayConfig
from serve.config.checks import load_config
from serve.gateway.reload import reload_from
from serve.gateway.status import status as status_of
from tests.fake_servers import FakeOpenAI
from tests.serve.conftest import Served, configured, serving_gateway
from tests.serve.process import octet_serve
from tests.serve.waiting import until

BODY = {"model": "m", "prompt": "abc", "max_tokens": 20, "ignore_eos": True}
QUIET = "health: {probe_after_s: null, interval_s: 60, load_interval_s: 60}"


def pool(*servers: FakeOpenAI, more: str = "") -> str:
    backends = ", ".join(f"{{type: vllm, url: '{s.url}', model: fake}}" for s in servers)
    return f"{{backends: [{backends}], {QUIET}, {more}}}"


def one_pool(*servers: FakeOpenAI, more: str = "") -> str:
    return f"models: {{m: {{pool: p}}}}\npools: {{p: {pool(*servers, more=more)}}}\n"


async def reload(served: Served, text: str) -> dict[str, Any]:
    path = served.gateway.path
    assert path is not None
    path.write_text(text)
    return await reload_from(served.gateway, path)


async def streaming(
    served: Served, server: FakeOpenAI, body: dict[str, Any]
) -> "asyncio.Task[Any]":
    """A streamed request that `server` has answered in part: the rest comes with `ended`."""
    server.runner.hold(ahead=3)
    task = asyncio.create_task(served.events("/v1/completions", body))
    await until(lambda: not server.runner.ahead)
    return task


async def ended(answer: "asyncio.Task[Any]", server: FakeOpenAI) -> bool:
    """Whether a request by `streaming` got its whole answer."""
    server.runner.gate.set()
    events: list[str] = await answer
    return events[-1] == "[DONE]"


async def test_what_is_unchanged_stays_and_the_rest_comes_and_goes(
    tmp_path: Path, upstreams: list[FakeOpenAI]
) -> None:
    first, second, third = upstreams
    gateway = configured(tmp_path / "octet.yaml", one_pool(first, second))
    async with serving_gateway(gateway) as served:
        kept, leaving = gateway.pools["p"].members
        report = await reload(served, one_pool(third, first, more="routing: {policy: prefix}"))
        new, still = gateway.pools["p"].members
        assert still is kept and still.name == "p-1"
        assert new.backend.name == f"vllm {third.url}" and leaving.standing == "leaving"
        assert gateway.pools["p"].config.routing.policy == "prefix"
        counts = [report[f"backends_{what}"] for what in ("added", "removed", "kept")]
        assert counts == [1, 1, 1] and report["needs_restart"] == []
        for _ in range(4):
            assert (await served.post("/v1/completions", BODY | {"max_tokens": 1}))[0] == 200
        assert not second.requests
        report = await reload(served, one_pool(third, first, more="routing: {policy: prefix}"))
        assert gateway.pools["p"].members == (new, still)
        assert report["backends_added"] == report["backends_removed"] == 0


async def test_a_pool_stays_whatever_its_models_are_called(
    tmp_path: Path, upstreams: list[FakeOpenAI]
) -> None:
    own, public = upstreams[:2]  # the one says which model it is asked for, the other does not
    unnamed = pool(public).replace(", model: fake", "")
    pools = f"pools: {{p: {pool(own)}, q: {unnamed}}}\n"
    first = "models: {a: {pool: q, fallback: [p]}, m: {pool: p}}\n" + pools
    then = "models: {m: {pool: p}, fake: {pool: q}}\n" + pools
    gateway = configured(tmp_path / "octet.yaml", first)
    async with serving_gateway(gateway) as served:
        before, kept, rebuilt = dict(gateway.pools), *(gateway.pools[n].members[0] for n in "pq")
        answer = await streaming(served, own, BODY)
        report = await reload(served, then)
        assert gateway.pools == before and gateway.pools["p"].members == (kept,)
        assert (report["pools_added"], report["pools_removed"]) == ([], [])
        assert [report[f"backends_{what}"] for what in ("added", "removed", "kept")] == [1, 1, 1]
        assert kept.in_flight == 1 and await ended(answer, own)
        assert gateway.pools["q"].members != (rebuilt,)
        status, _ = await served.post("/v1/completions", BODY | {"model": "fake"})
        assert status == 200 and public.requests[-1]["model"] == "fake"


async def test_a_new_one_without_a_name_takes_no_name_that_another_is_given(
    tmp_path: Path, upstreams: list[FakeOpenAI]
) -> None:
    first, second, third = upstreams
    gateway = configured(tmp_path / "octet.yaml", one_pool(first))
    async with serving_gateway(gateway) as served:
        text = one_pool(first, second, third)
        await reload(served, text.replace(f"'{third.url}'", f"'{third.url}', name: p-2"))
        assert [member.name for member in gateway.pools["p"].members] == ["p-1", "p-3", "p-2"]


async def test_a_pool_that_is_gone_serves_who_waits_for_it(
    tmp_path: Path, upstreams: list[FakeOpenAI]
) -> None:
    first, second, _ = upstreams
    one_at_a_time = "admission: {max_tokens: 1}"
    gateway = configured(tmp_path / "octet.yaml", one_pool(first, more=one_at_a_time))
    async with serving_gateway(gateway) as served:
        answer = await streaming(served, first, BODY)
        waiting = asyncio.create_task(served.post("/v1/completions", BODY | {"max_tokens": 2}))
        await until(lambda: gateway.admission.status()["pools"]["p"]["queued_requests"] == 1)
        other = f"models: {{n: {{pool: q}}}}\npools: {{q: {pool(second)}}}\n"
        report = await reload(served, other)
        assert (report["pools_added"], report["pools_removed"]) == (["q"], ["p"])
        status, error = await served.post("/v1/completions", BODY)
        assert (status, error["error"]["code"]) == (404, "model_not_found")
        assert gateway.running == 2
        assert status_of(gateway)["pools_finishing"] == ["p"]
        assert await ended(answer, first)
        assert (await waiting)[0] == 200
        await served.idle()
        assert (await served.post("/v1/completions", BODY | {"model": "n"}))[0] == 200
        assert len(first.requests) == 2 and len(second.requests) == 1


async def test_an_end_right_after_a_reload_closes_everything(
    tmp_path: Path, upstreams: list[FakeOpenAI]
) -> None:
    gateway = configured(tmp_path / "octet.yaml", one_pool(upstreams[0]))
    await gateway.start()
    members = list(gateway.pools["p"].members)
    (tmp_path / "octet.yaml").write_text(f"models: {{m: {{pool: {pool(upstreams[1])}}}}}\n")
    await reload_from(gateway, gateway.path)
    members += gateway.pools["m"].members
    await gateway.close()
    assert not any([await member.backend.ready() for member in members])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("models: {m: {pool: nowhere}}", "unknown pool 'nowhere'"),
        ("models: [", "line 1"),
        ("{good}pools: 1", "the key 'pools' is repeated"),
        # The first of its backends can work; the other has no files.
        ("models: {m: {pool: [{type: vllm, url: 'URL'}, {type: embedded, path: none}]}}", "none"),
        ("models: {m: {pool: p}}\npools: {p: {backends: [{type: embedded, path: none}]}}", "none"),
        ("models: {m: {pool: [{type: vllm, url: 'URL', api_key: '${NO_SUCH}'}]}}", "NO_SUCH"),
    ],
)
async def test_nothing_changes_if_anything_is_wrong(
    tmp_path: Path, upstreams: list[FakeOpenAI], text: str, reason: str
) -> None:
    good = one_pool(upstreams[0])
    gateway = configured(tmp_path / "octet.yaml", good)
    async with serving_gateway(gateway) as served:
        before = gateway.config, gateway.pools, gateway.pools["p"].members, gateway.epoch
        with pytest.raises(OctetError, match=re.escape(reason)):
            await reload(served, text.replace("{good}", good).replace("URL", upstreams[1].url))
        after = gateway.config, gateway.pools, gateway.pools["p"].members, gateway.epoch
        assert all(old is new for old, new in zip(before, after, strict=True))
        assert not gateway.pools["p"].retiring
        assert await served.metric("octet_reloads_total", outcome="failed") == 1
        status = status_of(gateway)
        assert status["last_reload"]["outcome"] == "failed"
        assert (await served.post("/v1/completions", BODY))[0] == 200


async def test_workers_take_no_limits_that_each_would_give_whole(
    tmp_path: Path, upstreams: list[FakeOpenAI]
) -> None:
    """As at the start of `octet serve --workers 2`."""
    good = one_pool(upstreams[0]) + "admin: {port: 9000}\n"
    gateway = configured(tmp_path / "octet.yaml", good)
    gateway.processes = 2
    async with serving_gateway(gateway) as served:
        await reload(served, good)
        key = f"{{name: k, sha256: {'a' * 64}, requests_per_minute: 10}}"
        with pytest.raises(OctetError, match=r"access\.shared: missing: each of 2 workers"):
            await reload(served, f"{good}access: {{keys: [{key}]}}\n")
        assert (await served.post("/v1/completions", BODY))[0] == 200


async def test_what_was_prepared_in_vain_is_closed(
    tmp_path: Path, upstreams: list[FakeOpenAI], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool stays as it was; one of its new backends could work, the other has no files."""
    gateway = configured(tmp_path / "octet.yaml", one_pool(upstreams[0]))
    started: list[OpenAiHttpBackend] = []
    start = OpenAiHttpBackend.start

    async def noted(backend: OpenAiHttpBackend) -> None:
        await start(backend)
        started.append(backend)

    async with serving_gateway(gateway) as served:
        monkeypatch.setattr(OpenAiHttpBackend, "start", noted)
        both = one_pool(upstreams[1]).replace("}],", "}, {type: embedded, path: none}],")
        with pytest.raises(OctetError, match="none"):
            await reload(served, both)
        (prepared,) = started
        assert prepared.name == f"vllm {upstreams[1].url}" and not await prepared.ready()
        assert (await served.post("/v1/completions", BODY))[0] == 200


async def test_a_defect_is_recorded_as_a_failure(
    tmp_path: Path, upstreams: list[FakeOpenAI], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(_path: Path) -> None:
        raise ValueError("a defect")

    gateway = configured(tmp_path / "octet.yaml", one_pool(upstreams[0]))
    async with serving_gateway(gateway) as served:
        monkeypatch.setattr("serve.gateway.reload.load_config", load)
        with pytest.raises(ValueError, match="a defect"):
            await reload_from(gateway, gateway.path)
        assert gateway.last_reload is not None
        assert (gateway.last_reload["outcome"], gateway.last_reload["reason"]) == (
            *("failed", "a defect"),
        )
        assert await served.metric("octet_reloads_total", outcome="failed") == 1


async def test_the_later_of_two_reloads_wins(
    tmp_path: Path, upstreams: list[FakeOpenAI], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the file that the first one reads is slow to come."""
    reading, go_on = threading.Event(), threading.Event()
    load = load_config

    def slow(path: Path) -> GatewayConfig:
        config = load(path)
        if config.limits.max_n == 2:
            reading.set()
            assert go_on.wait(60)
        return config

    text = one_pool(upstreams[0]) + "limits: {max_n: %d}\n"
    gateway = configured(tmp_path / "octet.yaml", text % 1)
    async with serving_gateway(gateway) as served:
        monkeypatch.setattr("serve.gateway.reload.load_config", slow)
        first = asyncio.create_task(reload(served, text % 2))
        await asyncio.to_thread(reading.wait, 10)
        second = asyncio.create_task(reload(served, text % 3))
        await asyncio.sleep(0.05)  # for the second to be done, if nothing holds it
        go_on.set()
        await asyncio.gather(first, second)
        assert gateway.config.limits.max_n == 3


async def test_a_gateway_that_drains_is_not_reloaded(
    tmp_path: Path, upstreams: list[FakeOpenAI]
) -> None:
    gateway = configured(tmp_path / "octet.yaml", one_pool(upstreams[0]))
    async with serving_gateway(gateway) as served:
        gateway.drain(5)
        before = gateway.epoch
        with pytest.raises(RequestError) as refused:
            await reload(served, one_pool(upstreams[1]))
        assert (refused.value.status, refused.value.code) == (503, "draining")
        assert gateway.epoch is before
        served.server.should_exit = True


async def test_what_takes_a_restart_is_said_and_stays(
    tmp_path: Path, upstreams: list[FakeOpenAI]
) -> None:
    gateway = configured(tmp_path / "octet.yaml", one_pool(upstreams[0]))
    async with serving_gateway(gateway) as served:
        more = "listen: {port: 1}\nadmin: {port: 2}\nlogs: {format: json}\nlimits: {max_n: 1}\n"
        report = await reload(served, one_pool(upstreams[0]) + more)
        assert report["needs_restart"] == ["listen", "admin.port", "logs"]
        assert gateway.config.listen.port == 8000 and gateway.config.admin.port is None
        status, error = await served.post("/v1/completions", BODY | {"n": 2})
        assert status == 400 and "n" in error["error"]["message"]


async def test_keys_and_aliases_come_and_go(tmp_path: Path, upstreams: list[FakeOpenAI]) -> None:
    gateway = configured(tmp_path / "octet.yaml", one_pool(upstreams[0]))
    digest = hashlib.sha256(b"sk-new").hexdigest()
    async with serving_gateway(gateway) as served:
        key = f"access: {{keys: [{{name: k, sha256: {digest}}}]}}\n"
        await reload(
            served, one_pool(upstreams[0]).replace("pool: p", "pool: p, aliases: [a]") + key
        )
        body = BODY | {"model": "a", "max_tokens": 1}
        assert (await served.post("/v1/completions", body))[0] == 401
        headers = {"authorization": "Bearer sk-new"}
        async with served.session.post("/v1/completions", json=body, headers=headers) as response:
            assert response.status == 200
        await reload(served, one_pool(upstreams[0]))
        assert (await served.post("/v1/completions", BODY))[0] == 200


async def test_reloads_under_load_lose_nothing(tmp_path: Path, upstreams: list[FakeOpenAI]) -> None:
    """300 streams, 24 at a time, while servers, settings and whole pools change beneath them."""
    first, second, third = upstreams
    texts = [
        one_pool(first, second),
        one_pool(second, third, more="routing: {policy: round_robin}"),
        f"models: {{m: {{pool: q}}}}\npools: {{q: {pool(third, first)}}}\n",
        f"models: {{m: {{pool: {pool(first)}}}}}\n",
        one_pool(third, second, first, more="admission: {max_tokens: 100}"),
    ]
    gateway = configured(tmp_path / "octet.yaml", texts[0])
    async with serving_gateway(gateway) as served:
        body = BODY | {"max_tokens": 8}
        at_a_time = asyncio.Semaphore(24)

        async def ask() -> None:
            async with at_a_time:
                events = await served.events("/v1/completions", body)
                assert events[-1] == "[DONE]"
                assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"

        load = asyncio.gather(*(ask() for _ in range(300)))
        reloads = 0
        while not load.done():
            reloads += 1
            await reload(served, texts[reloads % len(texts)])
        await load
        assert reloads >= 10
        assert min(len(server.requests) for server in upstreams) > 20
        await served.idle()
        assert gateway.running == 0
        await until(
            lambda: not (any(pool.retiring for pool in gateway.pools.values()) or gateway.earlier)
        )  # no connection is left to a server out of use


async def test_a_hangup_reloads(tmp_path: Path, upstreams: list[FakeOpenAI]) -> None:
    path = tmp_path / "octet.yaml"
    path.write_text(one_pool(upstreams[0]))
    with octet_serve(path) as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")

        async def until(word: str) -> str:
            async with asyncio.timeout(60):
                while word not in (line := await asyncio.to_thread(next, lines)):
                    pass
            return line

        url = (await until("serving m on")).split()[-1]
        async with aiohttp.ClientSession(url) as session:
            path.write_text("models: {m: {pool: nowhere}}")
            os.kill(process.pid, signal.SIGHUP)
            assert "nothing has changed" in await until("not reloaded")
            path.write_text(one_pool(upstreams[1]).replace("{m:", "{other:"))
            os.kill(process.pid, signal.SIGHUP)
            assert "backends_added 1" in await until("reloaded ")
            async with session.get("/v1/models") as response:
                assert [m["id"] for m in (await response.json())["data"]] == ["other"]
