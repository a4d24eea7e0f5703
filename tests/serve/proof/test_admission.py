"""The gateway over servers that are right, wrong, and replaced by wrong ones while they serve."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from octet.errors import BackendUnavailable
from octet.proof.verdict import WEAK
from serve.backends import connection as held
from serve.backends import openai_http
from serve.backends.openai_http import OpenAiHttpBackend
from serve.config import HttpConfig
from serve.gateway import unproven
from serve.gateway.status import status as status_of
from serve.http.status_page import render
from tests.fake_servers import FakeOpenAI, running
from tests.serve.in_process import Client, in_process
from tests.serve.proof.exams import FakeExam, FakeExams
from tests.serve.proof.fake_proofs import WORSE, served, write_proofs
from tests.serve.proof.front import Front
from tests.serve.upstreams import DONE, Scripted, chunk, whole
from tests.serve.waiting import until

ASK = {"model": "p", "prompt": "def route(", "max_tokens": 12, "temperature": 0}


@asynccontextmanager
async def gateway(proofs: Path, *servers: FakeOpenAI | Front) -> AsyncIterator[Client]:
    backends = [
        OpenAiHttpBackend("p", HttpConfig(type="vllm", url=server.url, model="fake"))
        for server in servers
    ]
    pool = {
        "backends": [{"type": "vllm", "url": server.url, "model": "fake"} for server in servers],
        "health": {
            "probe_after_s": None,
            "reconnect_s": 0.02,
            "interval_s": 0.5,
            "timeout_s": 20,  # a busy machine is no fault of a server's
        },
        "proof": {"golden": proofs, "every_s": 0.01, "timeout_s": 5},
    }
    async with in_process(("p", list(backends)), pools={"p": pool}) as client:
        yield client


async def standing(client: Client, *standings: str) -> Any:
    """The first backend's entry in /status, once it has one of these standings."""
    async with asyncio.timeout(60):
        while True:
            entry = status_of(client.gateway)["pools"]["p"]["backends"][0]
            if entry["standing"] in standings:
                return entry
            await asyncio.sleep(0.01)


async def replaced(before: FakeOpenAI, after: FakeOpenAI) -> None:
    """`after` takes the port of `before`, as fast as it can."""
    port = int(before.url.rpartition(":")[2])
    await before.stop()
    await after.start(port)


async def text_of(server: FakeOpenAI) -> str:
    """What it says to ASK itself."""
    backend = OpenAiHttpBackend("p", HttpConfig(type="vllm", url=server.url, model="fake"))
    async with in_process(("p", [backend])) as client:
        status, answer = await client.post("/v1/completions", ASK)
    assert status == 200
    return str(answer["choices"][0]["text"])


async def test_a_right_server_is_admitted_and_a_wrong_one_refused_by_name(proofs: Path) -> None:
    async with (
        running(served()) as right,
        running(served(WORSE)) as wrong,
        gateway(proofs, right, wrong) as client,
    ):
        told = status_of(client.gateway)["pools"]["p"]["backends"]
        assert [entry["standing"] for entry in told] == ["in", "refused"]
        good, bad = (entry["proof"] for entry in told)
        low, high = good["kl_interval"]
        assert 0 < low < good["kl"] < high < bad["kl"]
        # The mean of one draw of prompts may be outside of the expected range, its interval is not.
        assert low < good["expected_kl"][1] and good["expected_kl"][0] < high
        assert good["tokens"] > 1000 and good["prompts"] >= 24 and good["share"] == 1.0
        assert "k_scale" in bad["reason"] and "k_scale" in bad["remedy"]
        assert good["artifact"] == bad["artifact"] and len(good["artifact"]) == 64
        before = len(wrong.requests)
        for _ in range(10):
            status, _answer = await client.post("/v1/completions", ASK)
            assert status == 200
        assert len(wrong.requests) == before
        told = status_of(client.gateway)["pools"]["p"]["backends"][0]["proof"]
        assert 0 < told["share"] < 1 and told["tokens"] >= good["tokens"]
        of = {"pool": "p", "backend": "p-1"}
        assert client.metric("octet_backend_proof_state", **of) == 3
        assert client.metric("octet_backend_proof_state", pool="p", backend="p-2") == -1
        nats = client.metric("octet_backend_divergence_nats", figure="measured", **of)
        assert nats == pytest.approx(good["kl"], rel=1e-3)
        assert client.metric("octet_backend_probe_tokens_total", **of) == good["tokens"]
        assert client.metric("octet_backend_probes_total", outcome="as_expected", **of) == 1
        assert client.metric("octet_pool_unproven", pool="p") == 0


@pytest.mark.parametrize("streamed", [False, True])
async def test_no_client_gets_a_token_of_a_wrong_server_that_took_the_place_of_a_right_one(
    proofs: Path, streamed: bool
) -> None:
    """Clients ask all the time."""
    right, wrong = served(), served(WORSE)
    await right.start()
    good = await text_of(right)
    got: list[str] = []
    failed: list[int] = []

    async def ask(client: Client) -> None:
        while True:
            reply = await client.request("/v1/completions", ASK | {"stream": streamed})
            if reply.status != 200:
                failed.append(reply.status)
            elif streamed:
                got.append(_joined(reply.events))
            else:
                got.append(reply.json()["choices"][0]["text"])
            await asyncio.sleep(0)

    try:
        async with gateway(proofs, right) as client:
            assert (await standing(client, "in"))["proof"]["state"] == "proven"
            clients = [asyncio.create_task(ask(client)) for _ in range(8)]
            await until(lambda: len(got) >= 40)
            await replaced(right, wrong)
            asked = len(failed)
            entry = await standing(client, "refused")
            await until(lambda: len(failed) >= asked + 40)
            for task in clients:
                task.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
            assert "k_scale" in entry["proof"]["reason"]
        assert set(failed) <= {502, 503} and wrong.requests
        assert all(good.startswith(text) for text in got), set(got)
        assert await text_of(wrong) != good
    finally:
        await wrong.stop()


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("reset", [False, True])
async def test_nor_where_the_port_is_never_closed_and_a_request_is_on_its_way(
    proofs: Path, reset: bool, streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not `reset`, the old connections end as those do that a server closes for being idle."""
    monkeypatch.setattr(held, "IDLE_S", 0.0)
    monkeypatch.setattr(openai_http, "KEEP_ALIVE_S", 1e-9)  # each request has its own connection
    async with (
        running(served()) as right,
        running(served(WORSE)) as wrong,
        Front(right) as front,
        gateway(proofs, front) as client,
    ):
        await standing(client, "in")
        front.decide.clear()
        body = ASK | {"stream": streamed}
        asked = asyncio.create_task(client.request("/v1/completions", body))
        await until(lambda: front.undecided)
        front.swap(wrong, reset=reset)
        front.decide.set()
        reply = await asked
        assert reply.status in (502, 503), reply.body
        assert any(body["prompt"] == ASK["prompt"] for body in wrong.requests)
        entry = await standing(client, "refused")
        assert "k_scale" in entry["proof"]["reason"]


async def test_a_server_that_closes_idle_connections_is_asked_anew_and_comes_back(
    proofs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held, "IDLE_S", 0.0)
    async with (
        running(served()) as right,
        Front(right) as front,
        gateway(proofs, front) as client,
    ):
        probes = (await standing(client, "in"))["proof"]["probes"]
        front.swap(right, reset=False)
        await standing(client, "unproven")
        entry = await standing(client, "in")
        assert probes == {"as_expected": 1} and entry["proof"]["probes"]["as_expected"] == 2
        assert (await client.post("/v1/completions", ASK))[0] == 200


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_lost_request_is_tried_again_once_its_only_backend_was_recognized(
    streamed: bool,
) -> None:
    """Nobody else is asked meanwhile, and nobody is told that nothing is there."""
    lost = BackendUnavailable("it closed the connection", kind="lost")
    server = Scripted(lost, [chunk("x"), DONE] if streamed else whole())
    exam = FakeExam(seconds=0)
    async with in_process(("fake", [server]), exams=FakeExams(exam)) as client:
        ask = {"model": "fake", "prompt": "abc", "stream": streamed}
        reply = await client.request("/v1/completions", ask)
        assert reply.status == 200 and b"x" in reply.body
        assert server.asked == 2 and len(exam.asked) == 1


async def test_a_client_is_told_that_proof_is_why_nobody_answers() -> None:
    servers = [Scripted(whole(), address=f"10.0.0.{n}:80") for n in (1, 2)]
    wrong, busy = (server.name for server in servers)
    exam = FakeExam(seconds=0, says={wrong: "worse"}, busy={busy})
    async with in_process(("fake", list(servers)), exams=FakeExams(exam)) as client:
        members = client.gateway.pools["fake"].members

        async def error() -> dict[str, Any]:
            reply = await client.request("/v1/completions", {"model": "fake", "prompt": "a"})
            assert reply.status == 503 and int(reply.headers["retry-after"]) >= 1
            found: dict[str, Any] = reply.json()["error"]
            return found

        told = await error()
        assert told["code"] == "backend_unproven" and told["message"] == (
            "no backend of the pool 'fake' is proven (1 refused, 1 unproven)"
        )
        members[0].go_out("gone", reachable=False)
        assert (await error())["message"].endswith("(1 unproven)")
        members[1].go_out("gone", reachable=False)
        told = await error()
        assert told["code"] == "backend_unavailable" and "is available now" in told["message"]


async def test_tokens_that_clients_got_are_what_probes_may_have_a_share_of() -> None:
    server = Scripted(whole())
    exam = FakeExam(seconds=0)
    async with in_process(("fake", [server]), exams=FakeExams(exam)) as client:
        for _ in range(3):
            status, answer = await client.post("/v1/completions", {"model": "fake", "prompt": "a"})
            assert status == 200
        (member,) = client.gateway.pools["fake"].members
        assert member.served_tokens == 3 * answer["usage"]["total_tokens"] > 0


def _joined(events: list[str]) -> str:
    whole = [json.loads(event) for event in events if event != "[DONE]"]
    return "".join(choice["text"] for chunk in whole for choice in chunk.get("choices", ()))


async def test_a_server_that_only_a_bound_speaks_for_is_weakly_proven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It serves, and /status, its page and the metrics tell it from one that is proven."""
    proofs = write_proofs(tmp_path / "plain", scenarios=False)
    async with running(served()) as server, gateway(proofs, server) as client:
        entry = await standing(client, "in")
        assert entry["proof"]["state"] == "weakly_proven"
        assert "against a bound of 0.1" in entry["proof"]["reason"]
        assert entry["proof"]["reason"].endswith(f"; {WEAK}")
        reply = await client.request("/v1/completions", ASK)
        assert reply.status == 200 and "x-octet-artifact" not in reply.headers
        of = {"pool": "p", "backend": "p-1"}
        assert client.metric("octet_backend_proof_state", **of) == 2.5
        page = render(status_of(client.gateway))
        assert "Ready, with problems" in page and "weakly proven" in page and WEAK in page
        monkeypatch.setattr(unproven, "EVERY_S", 0.001)
        warning = asyncio.create_task(unproven.keep_warning(client.gateway))
        line = f"pool p: p-1 serves {WEAK}"
        await until(lambda: line in [record.getMessage() for record in caplog.records])
        warning.cancel()
