"""Many at once: streams that are held, and clients that go away at any moment."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from octet.errors import BackendError, BackendUnavailable
from tests.fakes import FakeRunner, fake_backend
from tests.serve.api.request.test_attempts import BODY, over, pools
from tests.serve.in_process import Client, in_process
from tests.serve.test_faults import relay_to
from tests.serve.upstreams import (
    CHUNKED_HEAD,
    DONE,
    JSON_HEAD,
    STREAM_HEAD,
    Scripted,
    chunk,
    forever,
    scripted,
    send,
    slowly,
    whole,
)
from tests.serve.waiting import until

FREED_S = 0.2  # of the event loop's clock, which a busy machine does not move


async def leave_at_random(served: Client, count: int, clients: int, mean_s: float) -> int:
    """`count` requests, each left at a random moment; how many were answered before."""
    rng, loop = random.Random(7), asyncio.get_running_loop()
    left, answered = count, 0

    async def client() -> None:
        nonlocal left, answered
        while left > 0:
            left -= 1
            gone = asyncio.Event()
            loop.call_later(rng.expovariate(1 / mean_s), gone.set)
            body = BODY | {"stream": rng.random() < 0.7}
            reply = await served.request("/v1/completions", body, gone=gone)
            answered += reply.complete

    await asyncio.gather(*(client() for _ in range(clients)))
    return answered


class Erratic(Scripted):
    """Answers, stalls, breaks and refuses, a little later each time."""

    def __init__(self, seed: int) -> None:
        super().__init__(whole())
        self.rng = random.Random(seed)

    async def relay(self, path: str, body: bytes, headers: Any) -> Any:
        await asyncio.sleep(self.rng.random() * 0.01)
        streamed: list[Any] = [chunk()] * self.rng.randrange(1, 9)
        endings: list[Any] = [[DONE], [DONE], [BackendError("cut", kind="lost")], [None]]
        refusals = [BackendUnavailable("no", kind=kind) for kind in ("refused", "failed")]
        stream = b'"stream": true' in body
        answers: list[Any] = [
            [b"", *streamed, *self.rng.choice(endings)] if stream else whole(),
            *(refusals if self.rng.random() < 0.3 else ()),
        ]
        self.outcomes = (self.rng.choice(answers),)
        return await super().relay(path, body, headers)

    async def _body(self, pieces: list[Any]) -> AsyncIterator[bytes]:
        async for piece in super()._body(pieces):
            await asyncio.sleep(self.rng.random() * 0.004)
            yield piece


async def test_ten_thousand_disconnects_leave_nothing_in_flight() -> None:
    """In the queue, while asking, between events, during retries: nothing is ever forgotten."""
    backends = [Erratic(1), Erratic(2)]
    settings = pools(admission={"max_tokens": 700}, timeouts={"first_token_s": 0.05})
    async with in_process(("fake", backends), pools=settings) as served:
        answered = await leave_at_random(served, 10_000, clients=200, mean_s=0.08)
        assert served.metric("octet_requests_in_flight", endpoint="/v1/completions") == 0
        left = served.metric("octet_client_disconnects_total", endpoint="/v1/completions")
        assert answered + left == 10_000 and left > 3000 and answered > 500
    # `in_process` has looked at the leases, the tickets, the budgets and the backends.


async def test_disconnects_free_real_connections() -> None:
    scripts = [
        send(STREAM_HEAD, chunk(), DONE),
        slowly(STREAM_HEAD, chunk() * 3 + DONE, 0.0005),
        forever(CHUNKED_HEAD),
        forever(),
        send(JSON_HEAD, whole()),
        forever(JSON_HEAD, whole()[:9]),
    ]
    rng = random.Random(5)
    async with scripted(*(rng.choice(scripts) for _ in range(1500))) as upstream:
        backend: Any = relay_to(upstream.url)
        async with over(backend) as served:
            await leave_at_random(served, 600, clients=30, mean_s=0.03)
            await upstream.freed()
            assert upstream.asked > 200
            assert not backend._session.connector._acquired


@pytest.mark.parametrize("begun", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_frees_its_backend_at_once(stream: bool, begun: bool) -> None:
    head, piece = (STREAM_HEAD, chunk()) if stream else (JSON_HEAD, whole()[:9])
    async with (
        scripted(forever(head, piece) if begun else forever()) as upstream,
        in_process(("fake", [relay_to(upstream.url)])) as served,
    ):
        gone = asyncio.Event()
        request = served.request("/v1/completions", BODY | {"stream": stream}, gone=gone)
        asking = asyncio.create_task(request)
        await until(lambda: upstream.running)
        await asyncio.sleep(0.02)
        now = asyncio.get_running_loop().time
        left_at = now()
        gone.set()
        await upstream.freed()
        assert now() - left_at < FREED_S
        assert not (await asking).complete
        assert served.metric("octet_client_disconnects_total", endpoint="/v1/completions") == 1


@pytest.mark.parametrize("choices", [1, 3])
async def test_a_client_that_goes_away_stops_the_embedded_engine(choices: int) -> None:
    engine = fake_backend(FakeRunner(delay_s=0.005))
    now = asyncio.get_running_loop().time
    async with in_process(("fake", [engine])) as served:
        for _ in range(10):  # the first that is soon: the engine's thread may wait for a processor
            gone = asyncio.Event()
            body = BODY | {"max_tokens": 400, "ignore_eos": True, "n": choices}
            asking = asyncio.create_task(served.request("/v1/completions", body, gone=gone))
            await until(lambda: not (engine.stats is None or engine.stats.running < choices))
            left_at = now()
            gone.set()
            await until(lambda: not engine.stats.running)
            took_s = now() - left_at
            await asking
            if took_s < FREED_S:
                break
        assert took_s < FREED_S


async def test_a_thousand_streams_are_held_at_once() -> None:
    begun, go_on = 0, asyncio.Event()

    async def held(writer: asyncio.StreamWriter) -> None:
        nonlocal begun
        writer.write(STREAM_HEAD + chunk("first"))
        begun += 1
        await go_on.wait()
        writer.write(chunk("last") + DONE)

    # Server and clients share one loop here: a thousand of both take a while to connect.
    async with (
        scripted(held) as upstream,
        in_process(("fake", [relay_to(upstream.url, connect_timeout_s=30)])) as served,
    ):
        asking = [asyncio.create_task(served.events("/v1/completions", BODY)) for _ in range(1000)]
        async with asyncio.timeout(60):
            await until(lambda: begun >= 1000)
            assert served.gateway.running == 1000
            go_on.set()
            answers = await asyncio.gather(*asking)
        assert all(len(events) == 3 and events[-1] == "[DONE]" for events in answers)
        assert served.metric("octet_retries_total", pool="fake", reason="refused") == 0
