"""Pools that stand in for one another: when, and what it counts as."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from octet.errors import RequestError
from tests.fakes import fake_backend
from tests.serve.api.request.test_attempts import (
    BODY,
    NO_BUDGET,
    STREAM,
    TURNS,
    Converting,
    busy,
    failed,
    lost,
    pools,
    refused,
)
from tests.serve.in_process import Client, in_process
from tests.serve.upstreams import Scripted, chunk, whole
from tests.serve.waiting import until

ASKED = BODY | {"model": "m"}
MODELS = {"m": {"pool": "fp8", "fallback": ["bf16"]}}


@pytest.mark.parametrize("failure", [refused, failed, lambda: busy(1)])
@pytest.mark.parametrize("stream", [False, True])
async def test_another_pool_answers_when_the_first_cannot(failure: Any, stream: bool) -> None:
    broken, sound = Scripted(failure()), Scripted(STREAM if stream else whole())
    settings = {name: pools(precision=name)["fake"] for name in ("fp8", "bf16")}
    async with in_process(
        ("fp8", [broken]), ("bf16", [sound]), models=MODELS, pools=settings
    ) as served:
        reply = await served.request("/v1/completions", ASKED | {"stream": stream})
        assert reply.status == 200 and (b"[DONE]" in reply.body) == stream
        labels = {"key": "anonymous", "model": "m", "backend": "bf16-1", "precision": "bf16"}
        counted = {"type": "output", "counted": "estimated" if stream else "backend"}
        assert served.metric("octet_tokens_total", **labels, **counted) >= 1


@asynccontextmanager
async def full(
    holding: Scripted, other: Scripted, **admission: Any
) -> AsyncIterator[tuple[Client, asyncio.Event]]:
    """The first pool has room for one request, which lasts until the event is set."""
    settings = {"fp8": pools(admission={"max_tokens": 8, **admission})["fake"]}
    backends = ("fp8", [holding]), ("bf16", [other])
    async with (
        in_process(*backends, models=MODELS, pools=settings) as served,
        served.holding(holding, ASKED) as gone,
    ):
        yield served, gone


async def test_a_full_pool_passes_on_to_the_next() -> None:
    sound = Scripted(whole())
    async with full(Scripted([chunk(), None]), sound, max_queue=0) as (served, _):
        status, _ = await served.post("/v1/completions", ASKED)
        assert (status, sound.asked) == (200, 1)


async def test_a_field_that_one_pool_cannot_take_goes_to_one_that_can() -> None:
    relaying = Scripted(whole())
    async with in_process(("fp8", [fake_backend()]), ("bf16", [relaying]), models=MODELS) as served:
        body = BODY | {"model": "m", "min_p": 0.5}
        status, _ = await served.post("/v1/completions", body)
        assert (status, relaying.asked) == (200, 1)


@pytest.mark.parametrize("failure", [refused, lambda: busy(1)])
async def test_what_nobody_follows_is_no_retry(failure: Any) -> None:
    broken, flaky, sound = Scripted(failure()), Scripted(lost()), Scripted([chunk(), None])
    settings = {
        "fp8": pools(retries={"budget": 0, "min_concurrent": 1})["fake"],
        "bf16": pools(retries=NO_BUDGET, routing=TURNS)["fake"],
    }
    async with in_process(
        ("fp8", [broken]), ("bf16", [flaky, sound]), models=MODELS, pools=settings
    ) as served:
        gone, asking = asyncio.Event(), []
        for count in (1, 2, 3):
            request = served.request("/v1/completions", ASKED | {"stream": True}, gone=gone)
            asking.append(asyncio.create_task(request))
            await until(lambda count=count: sound.running >= count)
        assert served.gateway.pools["fp8"].budget.retrying == 0
        for reason in ("refused", "overloaded"):
            assert served.metric("octet_retries_total", pool="fp8", reason=reason) == 0
        assert served.metric("octet_retries_exhausted_total", pool="fp8") == 0
        # Where the connection was lost there was another: the request had its one re-dispatch left.
        again = served.metric("octet_retries_total", pool="bf16", reason="lost")
        assert again == flaky.asked > 0
        gone.set()
        await asyncio.gather(*asking)


async def test_a_wait_counts_at_the_gate_that_it_was_at() -> None:
    async with full(Scripted([chunk(), None], busy(1)), Scripted(whole())) as (served, gone):
        second = asyncio.create_task(served.post("/v1/completions", ASKED))
        gate = served.gateway.admission.gates["fp8"]
        await until(lambda: len(gate.queue))
        await asyncio.sleep(0.05)
        gone.set()
        assert (await second)[0] == 200
        assert served.metric("octet_queue_seconds_sum", pool="fp8") >= 0.05
        assert served.metric("octet_queue_seconds_count", pool="bf16") == 1
        assert served.metric("octet_queue_seconds_sum", pool="bf16") == 0


async def test_who_waited_in_vain_at_one_gate_is_told_so_at_the_end(one_clock: None) -> None:
    silent = Scripted([None])
    async with full(Scripted([chunk(), None]), silent, max_wait_s=0.2) as (served, _):
        reply = await served.request("/v1/completions", ASKED, {"x-request-timeout": "0.4"})
        assert reply.status == 504 and silent.asked == 1
        message = reply.json()["error"]["message"]
        (queued,) = re.findall(r": (\S+) s queued", message)
        assert 0.19 <= float(queued) < 0.4, message


async def test_nobody_is_asked_for_a_client_that_has_gone() -> None:
    """Whatever the backend's clean-up calls a cancellation."""
    converting = Converting(RequestError("busy", status=503))
    spare, gone = Scripted(whole()), asyncio.Event()
    async with in_process(("fp8", [converting]), ("bf16", [spare]), models=MODELS) as served:
        request = served.request("/v1/completions", ASKED, gone=gone)
        asking = asyncio.create_task(request)
        await until(lambda: converting.asked)
        gone.set()
        assert (await asking).status == 0 and spare.asked == 0


async def test_retries_do_not_multiply_over_pools() -> None:
    broken = {name: [Scripted(failed()) for _ in range(3)] for name in "abcd"}
    settings = {name: pools(retries={"attempts": 3})["fake"] for name in broken}
    models = {"m": {"pool": "a", "fallback": ["b", "c", "d"]}}
    async with in_process(*broken.items(), models=models, pools=settings) as served:
        assert (await served.request("/v1/completions", ASKED)).status == 502
        asked = [sum(backend.asked for backend in pool) for pool in broken.values()]
        assert asked == [3, 1, 1, 1]
