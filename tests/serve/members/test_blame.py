"""Tests which failures count against a backend, which do not, and how one is readmitted."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from serve.api.errors import code_of, error_bytes
from serve.backends.base import Relay
from serve.backends.openai_errors import failure
from serve.backends.triton_errors import error_of
from tests.serve.api.request.test_attempts import (
    BODY,
    NO_BUDGET,
    STREAM,
    TURNS,
    ask,
    failed,
    over,
    pools,
)
from tests.serve.in_process import Client, Reply, in_process
from tests.serve.upstreams import DONE, Scripted, chunk, whole
from tests.serve.waiting import until

BLAMING = {"request": (400, "invalid", 5), "load": (503, "busy", 5), "model": (500, "CUDA", 2)}


@pytest.mark.parametrize(("status", "message", "asked"), BLAMING.values(), ids=BLAMING)
async def test_an_error_event_counts_for_what_it_says(
    status: int, message: str, asked: int
) -> None:
    event = b'data: {"error":{"message":"%s","code":%d}}\n\n' % (message.encode(), status)
    erring, sound = Scripted([chunk(), event, DONE]), Scripted(STREAM)
    async with over(erring, sound, ejection={"failures": 2}, routing=TURNS) as served:
        for _ in range(10):
            assert (await ask(served, stream=True))[0] == 200
        assert (erring.asked, sound.asked) == (asked, 10 - asked)


async def test_all_requests_of_a_server_that_drains_are_answered_elsewhere_at_once() -> None:
    """vLLM with --shutdown-timeout: what it has it finishes, and new requests it cannot take."""
    said = b'{"error":{"message":"cannot schedule new futures after shutdown","code":500}}'
    draining, sound = Scripted((500, said)), Scripted(whole())
    async with over(draining, sound, retries=NO_BUDGET, routing=TURNS) as served:
        asked = [ask(served) for _ in range(20)]
        assert {status for status, _ in await asyncio.gather(*asked)} == {200}
        assert served.gateway.pools["fake"].members[0].standing == "ejected"


async def test_what_it_said_counts_though_its_client_goes_at_that() -> None:
    """As the official client does at an error event, before [DONE] is there."""
    event = b'data: {"error":{"message":"EngineCore encountered an issue","code":500}}\n\n'
    dying, gone = Scripted([chunk(), event, None]), asyncio.Event()
    async with over(dying) as served:

        def leave(reply: Reply) -> None:
            if b"error" in reply.body:
                gone.set()

        stream = BODY | {"stream": True}
        await served.request("/v1/completions", stream, gone=gone, on_piece=leave)
        assert served.gateway.pools["fake"].members[0].standing == "ejected"
        assert served.metric("octet_broken_streams_total", model="fake") == 1
        assert served.metric("octet_client_disconnects_total", endpoint="/v1/completions") == 0


async def test_a_stream_that_breaks_after_its_error_event_has_one_error() -> None:
    event = b'data: {"error":{"message":"EngineCore encountered an issue","code":500}}\n\n'
    async with over(Scripted([chunk(), event])) as served:
        events = await served.events("/v1/completions", BODY)
        assert len(events) == 2 and "EngineCore" in events[1]
        assert served.gateway.pools["fake"].members[0].standing == "ejected"
        assert served.metric("octet_broken_streams_total", model="fake") == 1


class Frontend(Scripted):
    """Its engine answers nobody; what is refused, or needs no engine, is answered before it."""

    async def relay(self, path: str, body: bytes, headers: Any) -> Any:
        if path == "/tokenize":
            return Relay(200, {"content-type": "application/json"}, self._body([b'{"tokens":[1]}']))
        if b"refused" in body:
            error = b'{"error":{"message":"no","code":400}}'
            return Relay(400, {"content-type": "application/json"}, self._body([error]))
        return await super().relay(path, body, headers)


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [("/v1/completions", {"prompt": "refused"}, 400), ("/tokenize", {}, 200)],
    ids=["refusals", "tokens"],
)
async def test_what_needs_no_engine_hides_no_engine_that_fails(
    path: str, fields: dict[str, str], status: int
) -> None:
    failing, sound = Frontend(failed()), Frontend(whole())
    async with over(failing, sound, ejection={"failures": 3}, routing=TURNS) as served:
        member, other = served.gateway.pools["fake"].members
        for _ in range(6):
            assert [(await ask(served))[0] for _ in range(2)] == [200, 200]
            for _ in range(2):
                reply = await served.request(path, {"model": "fake", "prompt": "abc"} | fields)
                assert reply.status == status
        assert (member.standing, failing.asked) == ("ejected", 3)
        assert member.last_success == -math.inf < other.last_success


async def test_a_refusal_decides_no_trial() -> None:
    async with on_trial(whole()) as (served, _):
        (member,) = served.gateway.pools["fake"].members
        member.backend = Frontend(whole())
        refused = await served.post("/v1/completions", BODY | {"prompt": "refused"})
        assert (refused[0], member.standing, member.available) == (400, "trial", True)
        assert (await ask(served))[0] == 200 and member.standing == "in"


NOT_THERE = b'{"error":{"message":"The model does not support Embeddings API","code":501}}'


async def test_what_a_server_has_not_implemented_is_no_failure_of_it() -> None:
    """vLLM, of embeddings of a model that generates."""
    without, able = Scripted((501, NOT_THERE)), Scripted(b'{"data":[{"embedding":[1]}]}')
    asked = {"model": "fake", "input": "abc"}
    async with over(without, able, ejection={"failures": 1}, routing=TURNS) as served:
        for _ in range(4):
            assert (await served.post("/v1/embeddings", asked))[0] == 200
        assert served.gateway.pools["fake"].members[0].standing == "in"
    async with in_process(("fake", [without])) as served:
        status, answer = await served.post("/v1/embeddings", asked)
        assert (status, answer["error"]["code"]) == (400, "unsupported_operation")
        assert "fake-1" in answer["error"]["message"]


class Poisoned(Scripted):
    """Fails where the prompt says so."""

    async def relay(self, path: str, body: bytes, headers: Any) -> Any:
        self.outcomes = [failed() if b"poison" in body else whole()]
        return await super().relay(path, body, headers)


async def test_a_request_counts_once_at_each_member_however_often_it_is_tried() -> None:
    backends = [Poisoned(), Poisoned()]
    settings = pools(ejection={"failures": 2}, retries={"attempts": 6})
    async with in_process(("fake", backends), pools=settings) as served:
        assert (await served.post("/v1/completions", BODY | {"prompt": "poison"}))[0] == 502
        assert [backend.asked for backend in backends] != [1, 1]
        members = served.gateway.pools["fake"].members
        assert [member.standing for member in members] == ["in", "in"]


@asynccontextmanager
async def on_trial(*outcomes: Any) -> AsyncIterator[tuple[Client, Scripted]]:
    """One backend that was ejected, and may show that it is well again."""
    backend = Scripted(*outcomes)
    async with over(backend, ejection={"duration_s": 0.01}) as served:
        (member,) = served.gateway.pools["fake"].members
        member.breaker.trip()
        await until(lambda: member.standing == "trial")
        yield served, backend


async def test_one_long_stream_keeps_a_recovered_backend_from_nobody() -> None:
    async with on_trial([chunk(), None], whole()) as (served, _):
        gone, came = asyncio.Event(), asyncio.Event()
        request = served.request(
            "/v1/completions", BODY | {"stream": True}, gone=gone, on_piece=lambda _: came.set()
        )
        long = asyncio.create_task(request)
        await came.wait()
        for _ in range(3):
            assert (await ask(served))[0] == 200
        gone.set()
        await long


async def test_a_client_that_leaves_during_the_trial_leaves_room_for_another() -> None:
    async with on_trial([None], whole()) as (served, backend):
        gone = asyncio.Event()
        trial = asyncio.create_task(served.request("/v1/completions", BODY, gone=gone))
        await until(lambda: backend.running)
        assert (await ask(served))[0] == 503
        gone.set()
        await trial
        assert (await ask(served))[0] == 200


REFUSING = b'data: {"error":{"message":"bad","code":422,"type":"x"}}\n\n'


@pytest.mark.parametrize("before", [[], [chunk()]], ids=["first", "later"])
async def test_what_a_backend_calls_an_error_names_no_series(before: list[bytes]) -> None:
    async with in_process(("fake", [Scripted([*before, REFUSING, DONE])])) as served:
        await ask(served, stream=True)
        labels = {"endpoint": "/v1/completions", "code": "refused_by_backend"}
        assert served.metric("octet_errors_total", **labels) == 1


def test_a_code_from_outside_reaches_the_client_and_no_metric() -> None:
    said = b'{"error": {"message": "no", "code": "code_of_today_4711"}}'
    for refusal in (failure("a", 400, {}, said), error_of("a", None, OUR_ENTRY)):
        assert code_of(refusal) == "refused_by_backend"
        assert b"code_of_today_4711" in error_bytes(refusal)


OUR_ENTRY = '{"message": "no", "param": null, "code": "code_of_today_4711"}'
