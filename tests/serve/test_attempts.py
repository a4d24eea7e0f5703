"""Who is asked, how often, and what the client is told when nobody answers."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from octet.errors import BackendError, BackendUnavailable, RequestError
from serve.api.errors import code_of, error_bytes
from serve.api.fields import UnsupportedField
from serve.backends.openai_errors import failure
from serve.backends.triton_errors import error_of
from tests.fakes import fake_backend
from tests.serve.in_process import Client, in_process
from tests.serve.upstreams import DONE, Scripted, chunk, whole

BODY = {"model": "fake", "prompt": "abc", "max_tokens": 4}
STREAM = [chunk("a"), chunk("b"), DONE]
NO_BUDGET = {"budget": 0, "min_concurrent": 0}


def refused() -> BackendUnavailable:
    return BackendUnavailable("vllm http://10.0.0.1:80: cannot be reached", kind="refused")


def lost() -> BackendError:
    return BackendError("vllm http://10.0.0.1:80: closed the connection", kind="lost")


def failed() -> BackendUnavailable:
    return BackendUnavailable("vllm http://10.0.0.1:80: CUDA error", kind="failed")


def busy(retry_after_s: float) -> BackendUnavailable:
    return BackendUnavailable("queue full", kind="overloaded", retry_after_s=retry_after_s)


def pools(**settings: Any) -> dict[str, Any]:
    quiet = {"health": {"probe_after_s": None}, "ejection": {"failures": 100}}
    return {"fake": quiet | settings}


async def ask(served: Client, stream: bool = False) -> tuple[int, str]:
    """Status and text of the answer."""
    reply = await served.request("/v1/completions", BODY | {"stream": stream})
    return reply.status, reply.body.decode()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("failure", [refused, lost])
async def test_a_lost_connection_costs_neither_the_client_nor_the_budget(
    failure: Any, stream: bool
) -> None:
    broken, sound = Scripted(failure()), Scripted(STREAM if stream else whole())
    settings = pools(retries=NO_BUDGET, routing={"policy": "round_robin"})
    async with in_process(("fake", [broken, sound]), pools=settings) as served:
        for _ in range(4):
            status, text = await ask(served, stream)
            assert status == 200 and ("[DONE]" if stream else '"x"') in text
        assert broken.asked and sound.asked == 4
        reason = failure().kind
        retried = served.metric("octet_retries_total", pool="fake", reason=reason)
        assert retried == broken.asked


async def test_the_only_backend_is_asked_again_over_a_new_connection() -> None:
    once = Scripted(lost(), whole())
    async with in_process(("fake", [once]), pools=pools(retries=NO_BUDGET)) as served:
        assert (await ask(served))[0] == 200
        assert once.asked == 2


async def test_a_whole_answer_that_is_lost_half_way_is_asked_for_again() -> None:
    once = Scripted([b'{"choices":', lost()], whole())
    async with in_process(("fake", [once]), pools=pools(retries=NO_BUDGET)) as served:
        status, text = await ask(served)
        assert (status, text) == (200, whole().decode())


async def test_one_redispatch_a_request_and_then_the_budget_counts() -> None:
    backend = Scripted(lost())
    async with in_process(("fake", [backend]), pools=pools(retries=NO_BUDGET)) as served:
        status, text = await ask(served)
        assert (status, backend.asked) == (502, 2)
        assert "fake-1" in text and "10.0.0.1" not in text
        assert served.metric("octet_retries_exhausted_total", pool="fake") == 1


@pytest.mark.parametrize("attempts", [1, 2, 3])
async def test_failures_are_retried_as_often_as_is_allowed(attempts: int) -> None:
    backends = [Scripted(failed()) for _ in range(4)]
    settings = pools(retries={"attempts": attempts})
    async with in_process(("fake", backends), pools=settings) as served:
        status, text = await ask(served)
        assert status == 502 and "CUDA error" in text and "10.0.0.1" not in text
        assert sum(backend.asked for backend in backends) == attempts
        assert max(backend.asked for backend in backends) == 1


async def test_retries_are_no_more_than_the_budget() -> None:
    backends = [Scripted(failed()), Scripted(failed())]
    async with in_process(("fake", backends), pools=pools(retries=NO_BUDGET)) as served:
        assert (await ask(served))[0] == 502
        assert backends[0].asked + backends[1].asked == 1


async def test_a_refused_request_is_not_tried_elsewhere() -> None:
    error = RequestError("the prompt is too long", code="context_length_exceeded")
    backends = [Scripted(error), Scripted(error)]
    async with in_process(("fake", backends)) as served:
        status, text = await ask(served)
        assert status == 400 and "context_length_exceeded" in text
        assert backends[0].asked + backends[1].asked == 1


async def test_when_all_are_overloaded_the_client_learns_when_to_come_again() -> None:
    async with in_process(("fake", [Scripted(busy(7.2)), Scripted(busy(7.2))])) as served:
        reply = await served.request("/v1/completions", BODY)
        assert reply.status == 503 and reply.headers["retry-after"] == "8"


MODELS = {"m": {"pool": "fp8", "fallback": ["bf16"]}}


@pytest.mark.parametrize("failure", [refused, failed, lambda: busy(1)])
@pytest.mark.parametrize("stream", [False, True])
async def test_another_pool_answers_when_the_first_cannot(failure: Any, stream: bool) -> None:
    broken, sound = Scripted(failure()), Scripted(STREAM if stream else whole())
    settings = {name: pools(precision=name)["fake"] for name in ("fp8", "bf16")}
    async with in_process(
        ("fp8", [broken]), ("bf16", [sound]), models=MODELS, pools=settings
    ) as served:
        body = BODY | {"model": "m", "stream": stream}
        reply = await served.request("/v1/completions", body)
        assert reply.status == 200 and (b"[DONE]" in reply.body) == stream
        labels = {"key": "anonymous", "model": "m", "backend": "bf16-1", "precision": "bf16"}
        counted = {"type": "output", "counted": "estimated" if stream else "backend"}
        assert served.metric("octet_tokens_total", **labels, **counted) >= 1


async def test_a_full_pool_passes_on_to_the_next() -> None:
    busy_one, sound = Scripted([chunk(), None]), Scripted(whole())
    full = {"admission": {"max_tokens": 8, "max_queue": 0}}
    async with in_process(
        ("fp8", [busy_one]), ("bf16", [sound]), models=MODELS, pools={"fp8": full}
    ) as served:
        body, gone = BODY | {"model": "m"}, asyncio.Event()
        request = served.request("/v1/completions", body | {"stream": True}, gone=gone)
        first = asyncio.create_task(request)
        while not busy_one.running:
            await asyncio.sleep(0)
        status, _ = await served.post("/v1/completions", body)
        assert (status, sound.asked) == (200, 1)
        gone.set()
        await first


async def test_a_field_that_one_pool_cannot_take_goes_to_one_that_can() -> None:
    relaying = Scripted(whole())
    async with in_process(("fp8", [fake_backend()]), ("bf16", [relaying]), models=MODELS) as served:
        body = BODY | {"model": "m", "min_p": 0.5}
        status, _ = await served.post("/v1/completions", body)
        assert (status, relaying.asked) == (200, 1)


@pytest.mark.parametrize("failure", [lost, failed])
async def test_who_cannot_take_a_field_is_not_asked_again_when_the_others_fail(
    failure: Any,
) -> None:
    refusal = UnsupportedField("'tools' is not supported", param="tools")
    unfit = Scripted(*[refusal] * 20, whole())  # ends, should it be asked again and again
    async with in_process(("fake", [unfit, Scripted(failure())]), pools=pools()) as served:
        for asked in (1, 2, 3):
            assert (await ask(served))[0] == 502
            assert unfit.asked == asked


BLAMING = {"request": (400, "invalid", 5), "load": (503, "busy", 5), "model": (500, "CUDA", 2)}


@pytest.mark.parametrize(("status", "message", "asked"), BLAMING.values(), ids=BLAMING)
async def test_an_error_event_counts_for_what_it_says(
    status: int, message: str, asked: int
) -> None:
    event = b'data: {"error":{"message":"%s","code":%d}}\n\n' % (message.encode(), status)
    erring, sound = Scripted([chunk(), event, DONE]), Scripted(STREAM)
    settings = pools(ejection={"failures": 2}, routing={"policy": "round_robin"})
    async with in_process(("fake", [erring, sound]), pools=settings) as served:
        for _ in range(10):
            assert (await ask(served, stream=True))[0] == 200
        assert (erring.asked, sound.asked) == (asked, 10 - asked)


async def test_an_engine_that_is_dead_in_mid_stream_is_asked_no_more() -> None:
    event = b'data: {"error":{"message":"EngineCore encountered an issue","code":500}}\n\n'
    dying, sound = Scripted([chunk(), event, DONE]), Scripted(STREAM)
    settings = pools(routing={"policy": "round_robin"})
    async with in_process(("fake", [dying, sound]), pools=settings) as served:
        for _ in range(6):
            await ask(served, stream=True)
        assert dying.asked == 1


class Converting(Scripted):
    """Calls a request that is cancelled lost: its clean-up failed."""

    async def relay(self, *_arguments: Any) -> Any:
        self.asked += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise lost() from None


@pytest.mark.parametrize("why", ["gone", "late"])
async def test_what_a_backend_calls_a_cancellation_is_no_reason_to_try_again(why: str) -> None:
    backend, gone = Converting(), asyncio.Event()
    settings = pools(timeouts={"total_s": 60 if why == "gone" else 0.1})
    async with in_process(("fake", [backend]), pools=settings) as served:
        asking = asyncio.create_task(served.request("/v1/completions", BODY, gone=gone))
        while not backend.asked:
            await asyncio.sleep(0)
        if why == "gone":
            gone.set()
        async with asyncio.timeout(5):
            reply = await asking
        assert (reply.status, backend.asked) == (0 if why == "gone" else 504, 1)


async def test_a_late_first_token_is_late_whatever_the_backend_calls_it() -> None:
    converting, sound = Converting(), Scripted(STREAM)
    settings = pools(timeouts={"first_token_s": 0.1}, routing={"policy": "round_robin"})
    async with in_process(("fake", [converting, sound]), pools=settings) as served:
        for _ in range(2):
            assert (await ask(served, stream=True))[0] == 200
        assert (converting.asked, sound.asked) == (1, 2)
        assert served.metric("octet_retries_total", pool="fake", reason="timeout") == 1


class Poisoned(Scripted):
    """Fails where the prompt says so."""

    async def relay(self, path: str, body: bytes, headers: Any) -> Any:
        self.outcomes = [failed() if b"poison" in body else whole()]
        return await super().relay(path, body, headers)


async def test_what_one_client_asks_takes_the_only_backend_from_nobody() -> None:
    async with in_process(
        ("fake", [Poisoned()]), pools=pools(ejection={"failures": 2}, retries=NO_BUDGET)
    ) as served:
        for _ in range(9):
            assert (await served.post("/v1/completions", BODY | {"prompt": "poison"}))[0] == 502
        assert (await ask(served))[0] == 200


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
    settings = pools(ejection={"duration_s": 0.01})
    async with in_process(("fake", [backend]), pools=settings) as served:
        (member,) = served.gateway.pools["fake"].members
        member.breaker.trip()
        while member.standing != "trial":
            await asyncio.sleep(0.005)
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
        while not backend.running:
            await asyncio.sleep(0)
        assert (await ask(served))[0] == 503
        gone.set()
        await trial
        assert (await ask(served))[0] == 200


@pytest.mark.parametrize("failure", [refused, lambda: busy(1)])
async def test_what_nobody_follows_is_no_retry(failure: Any) -> None:
    broken, flaky, sound = Scripted(failure()), Scripted(lost()), Scripted([chunk(), None])
    settings = {
        "fp8": pools(retries={"budget": 0, "min_concurrent": 1})["fake"],
        "bf16": pools(retries=NO_BUDGET, routing={"policy": "round_robin"})["fake"],
    }
    async with in_process(
        ("fp8", [broken]), ("bf16", [flaky, sound]), models=MODELS, pools=settings
    ) as served:
        gone, asking = asyncio.Event(), []
        for count in (1, 2, 3):
            body = BODY | {"model": "m", "stream": True}
            asking.append(asyncio.create_task(served.request("/v1/completions", body, gone=gone)))
            while sound.running < count:
                await asyncio.sleep(0)
        assert served.gateway.pools["fp8"].budget.retrying == 0
        for reason in ("refused", "overloaded"):
            assert served.metric("octet_retries_total", pool="fp8", reason=reason) == 0
        assert served.metric("octet_retries_exhausted_total", pool="fp8") == 0
        # Where the connection was lost there was another: the request had its one re-dispatch left.
        again = served.metric("octet_retries_total", pool="bf16", reason="lost")
        assert again == flaky.asked > 0
        gone.set()
        await asyncio.gather(*asking)


async def test_a_place_in_the_budget_is_kept_from_retry_to_retry_and_then_given_back() -> None:
    backends = [Scripted(failed()), Scripted(failed()), Scripted(failed(), whole())]
    settings = pools(retries={"budget": 0, "min_concurrent": 1, "attempts": 9, "backoff_s": 0.001})
    async with in_process(("fake", backends), pools=settings) as served:
        assert (await ask(served))[0] == 200
        assert served.metric("octet_retries_total", pool="fake", reason="failed") >= 3
        assert served.gateway.pools["fake"].budget.retrying == 0


async def test_a_wait_counts_at_the_gate_that_it_was_at() -> None:
    holding, sound = Scripted([chunk(), None], busy(1)), Scripted(whole())
    small = pools(admission={"max_tokens": 8})["fake"]
    async with in_process(
        ("fp8", [holding]), ("bf16", [sound]), models=MODELS, pools={"fp8": small}
    ) as served:
        body, gone = BODY | {"model": "m"}, asyncio.Event()
        request = served.request("/v1/completions", body | {"stream": True}, gone=gone)
        first = asyncio.create_task(request)
        while not holding.running:
            await asyncio.sleep(0)
        second = asyncio.create_task(served.post("/v1/completions", body))
        await asyncio.sleep(0.05)
        gone.set()
        assert (await second)[0] == 200 and await first
        assert served.metric("octet_queue_seconds_sum", pool="fp8") >= 0.05
        assert served.metric("octet_queue_seconds_count", pool="bf16") == 1
        assert served.metric("octet_queue_seconds_sum", pool="bf16") == 0


async def test_who_waited_in_vain_at_one_gate_is_told_so_at_the_end() -> None:
    holding, silent = Scripted([chunk(), None]), Scripted([None])
    small = pools(admission={"max_tokens": 8, "max_wait_s": 0.2})["fake"]
    async with in_process(
        ("fp8", [holding]), ("bf16", [silent]), models=MODELS, pools={"fp8": small}
    ) as served:
        body, gone = BODY | {"model": "m"}, asyncio.Event()
        request = served.request("/v1/completions", body | {"stream": True}, gone=gone)
        first = asyncio.create_task(request)
        while not holding.running:
            await asyncio.sleep(0)
        reply = await served.request("/v1/completions", body, {"x-request-timeout": "0.4"})
        assert reply.status == 504 and silent.asked == 1
        message = reply.json()["error"]["message"]
        (queued,) = re.findall(r": (\S+) s queued", message)
        assert 0.19 <= float(queued) < 0.4, message
        gone.set()
        await first


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


async def test_nobody_available_is_a_503_that_names_the_pool() -> None:
    backend = Scripted(BackendUnavailable("Stub process is not healthy", kind="dead"))
    settings = pools(ejection={"duration_s": 30}, retries=NO_BUDGET)
    async with in_process(("fake", [backend]), pools=settings) as served:
        await ask(served)
        reply = await served.request("/v1/completions", BODY)
        assert reply.status == 503 and b"pool 'fake'" in reply.body
        assert 1 <= int(reply.headers["retry-after"]) <= 45
