"""Tests which backends are tried, how often, and the error if none answers."""

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from octet.errors import BackendError, BackendUnavailable, RequestError, UnsupportedField
from tests.serve.in_process import Client, in_process
from tests.serve.upstreams import DONE, Scripted, chunk, whole
from tests.serve.waiting import until

BODY = {"model": "fake", "prompt": "abc", "max_tokens": 4}
STREAM = [chunk("a"), chunk("b"), DONE]
NO_BUDGET = {"budget": 0, "min_concurrent": 0}
TURNS = {"policy": "round_robin"}


def refused() -> BackendUnavailable:
    return BackendUnavailable("vllm http://10.0.0.1:80: cannot be reached", kind="refused")


def lost() -> BackendError:
    return BackendError("vllm http://10.0.0.1:80: closed the connection", kind="lost")


def dead() -> BackendError:
    return BackendError("triton 10.0.0.1:80: its model died", kind="dead")


def failed() -> BackendUnavailable:
    return BackendUnavailable("vllm http://10.0.0.1:80: CUDA error", kind="failed")


def busy(retry_after_s: float) -> BackendUnavailable:
    return BackendUnavailable("queue full", kind="overloaded", retry_after_s=retry_after_s)


def pools(**settings: Any) -> dict[str, Any]:
    quiet = {"health": {"probe_after_s": None}, "ejection": {"failures": 100}}
    return {"fake": quiet | settings}


def over(*backends: Any, **settings: Any) -> AbstractAsyncContextManager[Client]:
    """A gateway over one pool of these, with these settings."""
    return in_process(("fake", list(backends)), pools=pools(**settings))


async def ask(served: Client, stream: bool = False) -> tuple[int, str]:
    """Status and text of the answer."""
    reply = await served.request("/v1/completions", BODY | {"stream": stream})
    return reply.status, reply.body.decode()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("failure", [refused, lost, dead])
async def test_a_lost_connection_costs_neither_the_client_nor_the_budget(
    failure: Any, stream: bool
) -> None:
    broken, sound = Scripted(failure()), Scripted(STREAM if stream else whole())
    async with over(broken, sound, retries=NO_BUDGET, routing=TURNS) as served:
        for _ in range(4):
            status, text = await ask(served, stream)
            assert status == 200 and ("[DONE]" if stream else '"x"') in text
        assert broken.asked and sound.asked == 4
        reason = failure().kind
        retried = served.metric("octet_retries_total", pool="fake", reason=reason)
        assert retried == broken.asked


async def test_all_requests_of_a_model_that_dies_are_answered_elsewhere() -> None:
    """They fail at one moment: many more than the budget lets through at a time."""
    dying, sound = Dying(dead()), Scripted(whole())
    async with over(dying, sound, retries=NO_BUDGET, routing=TURNS) as served:
        asking = [asyncio.create_task(ask(served)) for _ in range(40)]
        await until(lambda: dying.asked >= 20)
        dying.died.set()
        answers = await asyncio.gather(*asking)
        assert {status for status, _ in answers} == {200}
        assert (dying.asked, sound.asked) == (20, 40)


async def test_refused_connections_do_not_count_however_many() -> None:
    backends = [Scripted(refused()), Scripted(refused()), Scripted(refused()), Scripted(whole())]
    async with over(*backends, retries=NO_BUDGET, routing=TURNS) as served:
        assert (await ask(served))[0] == 200
        assert [backend.asked for backend in backends] == [1, 1, 1, 1]


async def test_one_redispatch_a_request_and_then_the_budget_counts() -> None:
    backend = Scripted(lost())
    async with over(backend, retries=NO_BUDGET) as served:
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


@pytest.mark.parametrize("failure", [lost, failed])
async def test_who_cannot_take_a_field_is_not_asked_again_when_the_others_fail(
    failure: Any,
) -> None:
    refusal = UnsupportedField("'tools' is not supported", param="tools")
    unfit = Scripted(*[refusal] * 20, whole())  # ends, should it be asked again and again
    async with over(unfit, Scripted(failure())) as served:
        for asked in (1, 2, 3):
            assert (await ask(served))[0] == 502
            assert unfit.asked == asked


class Dying(Scripted):
    """Answers nobody, and then all at once with its first outcome."""

    def __init__(self, *outcomes: Exception):
        super().__init__(*outcomes)
        self.died = asyncio.Event()

    async def relay(self, *_arguments: Any) -> Any:
        self.asked += 1
        await self.died.wait()
        raise self.outcomes[0]


class Converting(Scripted):
    """Its clean-up failed, and calls a request that is cancelled something else."""

    async def relay(self, *_arguments: Any) -> Any:
        self.asked += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise self.outcomes[0] from None


@pytest.mark.parametrize("why", ["gone", "late"])
async def test_what_a_backend_calls_a_cancellation_is_no_reason_to_try_again(why: str) -> None:
    backend, gone = Converting(lost()), asyncio.Event()
    async with over(backend, timeouts={"total_s": 60 if why == "gone" else 0.1}) as served:
        asking = asyncio.create_task(served.request("/v1/completions", BODY, gone=gone))
        await until(lambda: backend.asked)
        if why == "gone":
            gone.set()
        async with asyncio.timeout(60):
            reply = await asking
        assert (reply.status, backend.asked) == (0 if why == "gone" else 504, 1)


async def test_a_late_first_token_is_late_whatever_the_backend_calls_it() -> None:
    converting, sound = Converting(lost()), Scripted(STREAM)
    async with over(converting, sound, timeouts={"first_token_s": 0.1}, routing=TURNS) as served:
        for _ in range(2):
            assert (await ask(served, stream=True))[0] == 200
        assert (converting.asked, sound.asked) == (1, 2)
        assert served.metric("octet_retries_total", pool="fake", reason="timeout") == 1


async def test_a_place_in_the_budget_is_kept_from_retry_to_retry_and_then_given_back() -> None:
    backends = [Scripted(failed()), Scripted(failed()), Scripted(failed(), whole())]
    settings = pools(retries={"budget": 0, "min_concurrent": 1, "attempts": 9})
    async with in_process(("fake", backends), pools=settings) as served:
        assert (await ask(served))[0] == 200
        assert served.metric("octet_retries_total", pool="fake", reason="failed") >= 3
        assert served.gateway.pools["fake"].budget.retrying == 0


async def test_who_went_out_during_the_pause_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    overloaded, leaving = Scripted(busy(1)), Scripted(whole())
    async with over(overloaded, leaving, routing=TURNS) as served:
        pool = served.gateway.pools["fake"]
        monkeypatch.setattr(pool.budget, "backoff_s", lambda retry: 0.03)
        asking = asyncio.create_task(ask(served))
        await until(lambda: overloaded.asked)
        pool.members[1].go_out("away", reachable=False)
        assert (await asking)[0] == 503 and leaving.asked == 0
        assert served.metric("octet_retries_total", pool="fake", reason="overloaded") == 0


async def test_nobody_available_is_a_503_that_names_the_pool() -> None:
    backend = Scripted(BackendUnavailable("Stub process is not healthy", kind="dead"))
    async with over(backend, ejection={"duration_s": 30}, retries=NO_BUDGET) as served:
        await ask(served)
        reply = await served.request("/v1/completions", BODY)
        assert reply.status == 503 and b"pool 'fake'" in reply.body
        assert 1 <= int(reply.headers["retry-after"]) <= 45
