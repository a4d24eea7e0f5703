"""One request's life at its edges: what is held is given back, whatever happens when."""

import asyncio
import hashlib
import json
import random
from typing import Any

import pytest

from octet.errors import BackendUnavailable, RequestError
from serve.admission.memory import Memory
from serve.api import operation
from serve.api.request.exchange import read_body
from tests.serve.api.request.test_attempts import BODY, over
from tests.serve.in_process import in_process
from tests.serve.test_streams import Erratic
from tests.serve.upstreams import DONE, Scripted, chunk, whole


async def test_a_task_that_is_cancelled_anywhere_gives_everything_back() -> None:
    """As a server does that shuts down; `in_process` looks at what is held."""
    rng = random.Random(3)
    async with over(
        Erratic(1), Erratic(2), admission={"max_tokens": 100}, timeouts={"first_token_s": 0.05}
    ) as served:
        for _ in range(10):
            bodies = [BODY | {"stream": rng.random() < 0.7} for _ in range(60)]
            asking = [
                asyncio.create_task(served.request("/v1/completions", body)) for body in bodies
            ]
            loop = asyncio.get_running_loop()
            for task in asking:
                loop.call_later(rng.random() * 0.03, task.cancel)
            ended = await asyncio.gather(*asking, return_exceptions=True)
        assert any(isinstance(one, asyncio.CancelledError) for one in ended)
        assert served.metric("octet_requests_in_flight", endpoint="/v1/completions") == 0


class Sticky(Scripted):
    """Fails to let go of a stream."""

    async def _body(self, pieces: list[Any]) -> Any:
        try:
            for piece in pieces:
                if piece is None:
                    await asyncio.Event().wait()
                yield piece
        finally:
            raise RuntimeError("cannot close")


@pytest.mark.parametrize("rest", [[None], [chunk()] * 50], ids=["waiting", "sending"])
async def test_an_answer_that_cannot_be_closed_holds_nothing_back(rest: list[Any]) -> None:
    async with in_process(("fake", [Sticky([chunk(), *rest])])) as served:
        gone = asyncio.Event()
        await served.request(
            "/v1/completions",
            BODY | {"stream": True},
            gone=gone,
            on_piece=lambda reply: gone.set(),
        )
        assert served.metric("octet_client_disconnects_total", endpoint="/v1/completions") == 1


class Slow(Scripted):
    """Takes its time to let go of a stream."""

    async def _body(self, pieces: list[Any]) -> Any:
        try:
            for piece in pieces:
                yield piece
        finally:
            await asyncio.sleep(0.1)


async def test_a_deadline_that_passes_while_a_broken_stream_is_closed_changes_nothing() -> None:
    def cannot_send(reply: Any) -> None:
        if reply.body.endswith(chunk("2")):
            raise OSError("the client's socket broke")

    backend = Slow([chunk("1"), chunk("2"), chunk("3"), DONE])
    async with over(backend, timeouts={"total_s": 0.05}) as served:
        body = BODY | {"stream": True}
        reply = await served.request("/v1/completions", body, on_piece=cannot_send)
        assert b"internal_error" in reply.body
        assert served.metric("octet_deadlines_total", stage="total") == 0


async def test_a_backend_that_never_lets_go_of_a_stream_holds_nothing_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Clinging(Scripted):
        async def _body(self, pieces: list[Any]) -> Any:
            try:
                yield pieces[0]
                yield pieces[0]
            finally:
                await asyncio.Event().wait()

    monkeypatch.setattr(operation, "CLOSE_S", 0.05)
    async with in_process(("fake", [Clinging([chunk()])])) as served:
        gone = asyncio.Event()
        body = BODY | {"stream": True}
        leave = lambda _: gone.set()  # noqa: E731
        async with asyncio.timeout(60):
            await served.request("/v1/completions", body, gone=gone, on_piece=leave)


async def test_a_defect_of_ours_is_a_500_without_its_details() -> None:
    async with in_process(("fake", [Scripted(RuntimeError("secret"))])) as served:
        reply = await served.request("/v1/completions", BODY)
        assert reply.status == 500 and reply.json()["error"]["type"] == "internal_error"
        assert b"secret" not in reply.body


async def test_a_field_called_stream_means_nothing_to_what_does_not_stream() -> None:
    backend = Scripted(whole())
    async with in_process(("fake", [backend])) as served:
        body = {"model": "fake", "input": "abc", "stream": True, "n": 3}
        reply = await served.request("/v1/embeddings", body)
        assert reply.status == 200
        assert json.loads(backend.sent[0]) == body


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_over_the_limit_is_refused_as_soon_as_it_is_known(declared: bool) -> None:
    taken = 0

    async def receive() -> Any:
        nonlocal taken
        taken += 1
        return {"type": "http.request", "body": b"x" * 60, "more_body": True}

    headers = {b"content-length": b"101"} if declared else {}
    with pytest.raises(Exception, match="larger than the limit of 100 bytes"):
        await read_body(receive, headers, 100)
    assert taken == (0 if declared else 2)


async def test_no_body_is_read_while_memory_is_short() -> None:
    holding = Scripted([chunk(), None])
    async with in_process(("fake", [holding])) as served, served.holding(holding, BODY):
        served.gateway.admission.memory = Memory(1)  # byte
        reply = await served.request("/v1/completions", b"this would be a 400")
        assert (reply.status, reply.json()["error"]["code"]) == (503, "overloaded")


async def test_a_key_pays_for_what_it_got() -> None:
    backend = Scripted(
        whole(),
        RequestError("too long"),
        [chunk(), chunk(), None],
        BackendUnavailable("broken", kind="dead"),
        whole(),
    )
    digest = hashlib.sha256(b"secret").hexdigest()
    access = {"keys": [{"name": "k", "sha256": digest, "tokens_per_minute": 1000}]}
    async with in_process(("fake", [backend]), access=access) as served:

        async def left(stream: bool = False) -> int:
            gone = asyncio.Event()
            reply = await served.request(
                "/v1/completions",
                BODY | {"stream": stream},
                {"authorization": "Bearer secret"},
                gone=gone,
                on_piece=lambda reply: asyncio.get_running_loop().call_later(0.02, gone.set),
            )
            return int(reply.headers["x-ratelimit-remaining-tokens"])

        assert await left() == 998  # a token read, a token written
        assert await left() == 998  # refused
        await left(stream=True)  # left after two tokens: three with the prompt
        assert await left() == 995  # nobody answered
        assert served.gateway.pools["fake"].members[0].breaker.state == "open"
