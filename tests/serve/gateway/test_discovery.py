"""Backends that are found: at a name's addresses, and in a file that changes."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from serve.config import DnsDiscovery
from serve.gateway import discovery
from serve.gateway.discovery import Discovery
from serve.gateway.state import Gateway
from serve.gateway.status import status as status_of
from serve.routing import Member, Pool
from tests.fake_servers import FakeOpenAI
from tests.serve.conftest import configured, serving_gateway
from tests.serve.gateway.test_reload import BODY, QUIET, ended, reload, streaming
from tests.serve.http.test_admin import ADMIN, call
from tests.serve.waiting import until


def listing(*servers: FakeOpenAI) -> str:
    return "".join(f"- {{type: vllm, url: '{s.url}', model: fake}}\n" for s in servers) or "[]"


def write(path: Path, text: str) -> None:
    """As a whole, as whoever generates such a file should."""
    path.with_suffix(".new").write_text(text)
    os.replace(path.with_suffix(".new"), path)


def addresses(gateway: Gateway) -> list[str]:
    return [member.backend.name.removeprefix("vllm ") for member in gateway.pools["m"].members]


class TestFile:
    CONFIG = (
        f"models: {{m: {{pool: {{{QUIET}, discover: [{{file: found.yaml, every_s: 0.02}}]}}}}}}"
    )

    async def test_backends_come_and_go(self, tmp_path: Path, upstreams: list[FakeOpenAI]) -> None:
        first, second, _ = upstreams
        found = tmp_path / "found.yaml"
        write(found, listing(first))
        gateway = configured(tmp_path / "octet.yaml", self.CONFIG)
        async with serving_gateway(gateway) as served:
            assert addresses(gateway) == [first.url]  # before the first request
            (member,) = gateway.pools["m"].members
            answer = await streaming(served, first, BODY)
            write(found, listing(second, first))
            await until(lambda: len(addresses(gateway)) == 2)
            assert gateway.pools["m"].members[0] is member
            write(found, listing(second))
            await until(lambda: addresses(gateway) == [second.url])
            assert (await served.post("/v1/completions", BODY | {"max_tokens": 1}))[0] == 200
            assert await ended(answer, first)
            assert len(first.requests) == len(second.requests) == 1

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            (None, "No such file"),
            ("", "top level: should be a list"),
            ("- {type: vllm, url: 'http://h', mdl: x}", "0.mdl: unknown key"),
            ("- {type: vllm", "line 1"),
            (
                "[{type: vllm, url: 'http://h', name: a}, {type: vllm, url: 'http://i', name: a}]",
                "1.name: 'a' is there twice",
            ),
            ("- {type: embedded, path: none}", "none: no such directory"),
        ],
    )
    async def test_a_broken_one_changes_nothing(
        self, tmp_path: Path, upstreams: list[FakeOpenAI], text: str | None, problem: str
    ) -> None:
        found = tmp_path / "found.yaml"
        write(found, listing(upstreams[0]))
        gateway = configured(tmp_path / "octet.yaml", self.CONFIG)
        async with serving_gateway(gateway):
            (source,) = gateway.discoveries
            found.unlink() if text is None else write(found, text)
            await until(lambda: source.problem)
            assert problem in source.problem
            assert status_of(gateway, addresses=True)["pools"]["m"]["discovery"] == [
                {"source": f"file {found}", "problem": source.problem}
            ]
            if text is None or "embedded" not in text:
                assert addresses(gateway) == [upstreams[0].url]
            write(found, listing(upstreams[0], upstreams[1]))
            await until(lambda: len(addresses(gateway)) == 2)
            await until(lambda: not source.problem)

    async def test_all_are_looked_at_at_once(
        self, tmp_path: Path, upstreams: list[FakeOpenAI], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Or many that do not answer would hold up the one that does, and each reload."""
        preparing, most = 0, 0
        prepare = Pool.prepare

        async def counted(*args: Any) -> Member:
            nonlocal preparing, most
            preparing += 1
            most = max(most, preparing)
            try:
                return await prepare(*args)
            finally:
                preparing -= 1

        monkeypatch.setattr(Pool, "prepare", counted)
        named = listing(upstreams[2]).replace("{", "{name: m-1, ")
        write(tmp_path / "found.yaml", listing(*upstreams[:2]) + named)
        gateway = configured(tmp_path / "octet.yaml", self.CONFIG)
        async with serving_gateway(gateway):
            assert most == 3
            names = {member.name: member.backend.name for member in gateway.pools["m"].members}
            assert len(names) == 3 and names["m-1"] == f"vllm {upstreams[2].url}"

    async def test_what_is_prepared_when_it_ends_is_closed(
        self, tmp_path: Path, upstreams: list[FakeOpenAI], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prepare, done = Pool.prepare, list[Member]()

        async def one_hangs(pool: Pool, config: Any, origin: str) -> Member:
            if config.url == upstreams[1].url:
                await asyncio.Event().wait()
            done.append(await prepare(pool, config, origin))
            return done[-1]

        monkeypatch.setattr(Pool, "prepare", one_hangs)
        monkeypatch.setattr(discovery, "FIRST_ROUND_S", 0.01)
        write(tmp_path / "found.yaml", listing(*upstreams[:2]))
        gateway = configured(tmp_path / "octet.yaml", self.CONFIG)
        async with serving_gateway(gateway):
            await until(lambda: done)
            assert await done[0].backend.ready()
            await gateway.discoveries[0].close()
            assert not await done[0].backend.ready()

    async def test_what_was_found_outlives_a_reload(
        self, tmp_path: Path, upstreams: list[FakeOpenAI]
    ) -> None:
        write(tmp_path / "found.yaml", listing(upstreams[0]))
        gateway = configured(tmp_path / "octet.yaml", self.CONFIG)
        async with serving_gateway(gateway) as served:
            before = gateway.pools["m"].members
            await reload(served, self.CONFIG.replace(QUIET, f"{QUIET}, precision: fp8"))
            assert gateway.pools["m"].members == before
            assert gateway.pools["m"].precision == "fp8"
            write(tmp_path / "found.yaml", listing(upstreams[1]))  # and is looked after still
            await until(lambda: addresses(gateway) == [upstreams[1].url])
            text = f"models: {{m: {{pool: {{backends: {listing(upstreams[0]).strip('- ')} }}}}}}"
            await reload(served, text.replace("backends: ", "backends: [").replace("\n", "]"))
            assert addresses(gateway) == [upstreams[0].url]


class TestDns:
    async def test_every_address_is_a_backend(
        self,
        tmp_path: Path,
        upstreams: list[FakeOpenAI],
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        answer: set[str] | OSError = {"127.0.0.1"}

        async def addresses_of(name: str, port: int) -> set[str]:
            assert name == "vllm.internal"
            if isinstance(answer, OSError):
                raise answer
            return answer

        monkeypatch.setattr(discovery, "addresses_of", addresses_of)
        port = int(upstreams[0].url.rpartition(":")[2])
        gateway = configured(tmp_path / "octet.yaml", dns("vllm.internal", port))
        async with serving_gateway(gateway) as served:
            assert addresses(gateway) == [f"http://127.0.0.1:{port}"]
            first = gateway.pools["m"].members[0]
            answer = {"127.0.0.1", "::1"}
            await until(lambda: len(addresses(gateway)) == 2)
            assert addresses(gateway)[1] == f"http://[::1]:{port}"
            assert gateway.pools["m"].members[0] is first
            answer = OSError(-2, "Name or service not known")
            (source,) = gateway.discoveries
            await until(lambda: source.problem)
            assert source.problem == "dns vllm.internal: Name or service not known"
            assert len(addresses(gateway)) == 2
            assert "keeping its backends" in caplog.text
            answer = {"127.0.0.1"}
            await until(lambda: len(addresses(gateway)) == 1)
            assert (await served.post("/v1/completions", BODY))[0] == 200

    async def test_one_that_was_removed_stays_away_until_the_name_has_lost_it(
        self, tmp_path: Path, upstreams: list[FakeOpenAI], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        answers, asked = [{"127.0.0.1", "::1"}], 0

        async def addresses_of(name: str, port: int) -> set[str]:
            nonlocal asked
            asked += 1
            return answers[-1]

        async def rounds(count: int) -> None:
            later = asked + count
            await until(lambda: asked >= later)

        monkeypatch.setattr(discovery, "addresses_of", addresses_of)
        port = int(upstreams[0].url.rpartition(":")[2])
        text = dns("vllm.internal", port) + "\n" + ADMIN
        gateway = configured(tmp_path / "octet.yaml", text)
        async with serving_gateway(gateway) as served:
            (member,) = (m for m in gateway.pools["m"].members if "127.0.0.1" in m.backend.name)
            removed = await call(served, "DELETE", f"/admin/pools/m/backends/{member.name}")
            assert removed[0] == 200
            await rounds(3)
            assert addresses(gateway) == [f"http://[::1]:{port}"]
            for addressed in (True, False):
                (found,) = status_of(gateway, addresses=addressed)["pools"]["m"]["backends"]
                assert found["origin"] == (f"dns vllm.internal:{port}" if addressed else "dns")
            answers.append({"::1"})
            await rounds(2)
            answers.append({"127.0.0.1", "::1"})
            await until(lambda: len(addresses(gateway)) == 2)

    async def test_a_real_name_is_asked(self, tmp_path: Path, upstreams: list[FakeOpenAI]) -> None:
        port = int(upstreams[0].url.rpartition(":")[2])
        gateway = configured(tmp_path / "octet.yaml", dns("localhost", port))
        async with serving_gateway(gateway) as served:
            assert f"http://127.0.0.1:{port}" in addresses(gateway)
            assert (await served.post("/v1/completions", BODY))[0] == 200

    async def test_a_name_that_nobody_knows_is_no_failure(self, tmp_path: Path) -> None:
        gateway = configured(tmp_path / "octet.yaml", dns("no.such.host.invalid", 1))
        async with serving_gateway(gateway) as served:
            assert gateway.discoveries[0].problem.startswith("dns no.such.host.invalid: ")
            async with served.session.get("/ready") as response:
                assert response.status == 503


@pytest.mark.parametrize("turns", range(5))
async def test_a_start_that_is_cancelled_as_its_source_answers_ends(
    turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = asyncio.Event()

    async def addresses_of(_name: str, _port: int) -> set[str]:
        await answer.wait()
        return set()

    monkeypatch.setattr(discovery, "addresses_of", addresses_of)
    source = DnsDiscovery.model_validate(
        {"dns": "vllm.internal", "port": 1, "backend": {"type": "vllm", "model": "fake"}}
    )
    found = Discovery(source, Pool.of("p", []), ["fake"], asyncio.Lock())
    starting = asyncio.create_task(found.start())
    await asyncio.sleep(0.01)  # until it waits
    answer.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    if starting.cancel():
        with pytest.raises(asyncio.CancelledError):
            await starting
    await found.close()


def dns(name: str, port: int) -> str:
    source = f"{{dns: {name}, port: {port}, every_s: 0.02, backend: {{type: vllm, model: fake}}}}"
    return f"models: {{m: {{pool: {{{QUIET}, discover: [{source}]}}}}}}"
