"""Deadlines: of the first token, of silence, of all; the gateway's, and the client's own."""

import asyncio
import hashlib
import json
import re
from typing import Any

import pytest

from octet.errors import BackendError
from serve.api.request.deadlines import Deadlines
from tests.serve.api.request.test_attempts import BODY, TURNS, over, pools
from tests.serve.conftest import serving
from tests.serve.in_process import Client, in_process
from tests.serve.upstreams import DONE, Scripted, chunk, whole
from tests.serve.waiting import until


async def ask(
    served: Client, timeout: str | None = None, **fields: Any
) -> tuple[int, dict[str, Any]]:
    headers = {} if timeout is None else {"X-Request-Timeout": timeout}
    reply = await served.request("/v1/completions", BODY | fields, headers)
    return reply.status, reply.json()


def within(**seconds: float) -> dict[str, Any]:
    return pools(timeouts={f"{name}_s": value for name, value in seconds.items()})


def deadlines(served: Client) -> dict[str, float]:
    found = {s: served.metric("octet_deadlines_total", stage=s) for s in STAGES}
    return {stage: count for stage, count in found.items() if count}


STAGES = ("total", "first_token", "inter_token")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("whose", ["gateway", "client"])
async def test_the_total_is_a_504_with_what_was_spent(
    whose: str, stream: bool, one_clock: None
) -> None:
    silent = Scripted([None])
    total_s, asked = (0.2, None) if whose == "gateway" else (60, "0.2")
    async with in_process(("fake", [silent]), pools=within(total=total_s)) as served:
        now = asyncio.get_running_loop().time
        started = now()
        status, answer = await ask(served, asked, stream=stream)
        assert 0.15 < now() - started < 1
        error = answer["error"]
        assert (status, error["code"], error["type"]) == (504, "deadline_exceeded", "timeout_error")
        spent = r"0\.0\d s queued, 0\.[12]\d s waiting for fake-1; nothing had been sent"
        assert re.fullmatch(f"the deadline of 0.2 s passed: {spent}", error["message"])
        assert deadlines(served) == {"total": 1}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_prompt_of_a_request_that_is_too_late_counts(stream: bool) -> None:
    digest = hashlib.sha256(b"sk-one").hexdigest()
    access = {"keys": [{"name": "one", "sha256": digest, "tokens_per_day": 1000}]}
    key = {"Authorization": "Bearer sk-one"}
    settings = within(total=0.1)
    async with in_process(("fake", [Scripted([None])]), pools=settings, access=access) as served:
        body = BODY | {"prompt": "abcd" * 30, "stream": stream}
        reply = await served.request("/v1/completions", body, key)
        assert reply.status == 504
        labels = {"key": "one", "model": "fake", "backend": "fake-1", "precision": ""}
        counted = {"type": "input", "counted": "estimated"}
        assert served.metric("octet_tokens_total", **labels, **counted) == 30
        assert served.gateway.keys.usage.spent("one") == 30


async def test_a_client_cannot_have_more_time_than_the_gateway_gives() -> None:
    async with in_process(("fake", [Scripted([None])]), pools=within(total=0.1)) as served:
        status, answer = await ask(served, "3600")
        assert status == 504 and "deadline of 0.1 s" in answer["error"]["message"]


@pytest.mark.parametrize("whose", ["gateway", "client"])
async def test_a_client_in_a_hurry_ejects_nobody(whose: str) -> None:
    total_s, asked = (0.05, None) if whose == "gateway" else (60, "0.05")
    settings = within(total=total_s)
    settings["fake"] |= {"ejection": {"failures": 1}, "routing": TURNS}
    async with in_process(("fake", [Scripted([None]), Scripted([None])]), pools=settings) as served:
        for _ in range(4):
            assert (await ask(served, asked))[0] == 504
        standings = [member.standing for member in served.gateway.pools["fake"].members]
        assert standings == (["ejected", "in"] if whose == "gateway" else ["in", "in"])


@pytest.mark.parametrize("value", ["0", "-1", "soon", "inf", "nan", "", "1e999"])
async def test_a_timeout_that_is_no_time_is_refused(value: str) -> None:
    backend = Scripted(whole())
    async with in_process(("fake", [backend])) as served:
        status, answer = await ask(served, value)
        assert (status, answer["error"]["param"]) == (400, "X-Request-Timeout")
        assert backend.asked == 0


async def test_time_in_the_queue_counts() -> None:
    silent = Scripted([None])
    async with over(silent, admission={"max_tokens": 8}) as served:
        first = asyncio.create_task(ask(served, "0.6", stream=False))
        await until(lambda: silent.running)
        status, answer = await ask(served, "0.2")
        assert status == 504 and silent.asked == 1
        assert "queue" in answer["error"]["message"]
        assert (await first)[0] == 504
        gate = served.gateway.admission.gates["fake"]
        assert (gate.tokens, gate.requests, len(gate.queue)) == (0, 0, 0)


async def test_no_first_token_anywhere_is_a_504() -> None:
    async with in_process(("fake", [Scripted([None])]), pools=within(first_token=0.3)) as served:
        now = asyncio.get_running_loop().time
        started = now()
        status, answer = await ask(served, stream=True)
        assert 0.25 < now() - started < 0.55
        message = answer["error"]["message"]
        assert status == 504 and "fake-1 sent no token within 0.3 s" in message
        assert deadlines(served) == {"first_token": 1}


async def test_the_time_of_a_first_token_does_not_run_in_a_queue() -> None:
    broken, held = Scripted(BackendError("no")), Scripted([None], [chunk(), DONE])
    settings = {
        "fp8": {"timeouts": {"first_token_s": 0.1}, "retries": {"attempts": 1}},
        "bf16": {"admission": {"max_tokens": 8}},
    }
    models = {"m": {"pool": "fp8", "fallback": ["bf16"]}}
    async with in_process(
        ("fp8", [broken]), ("bf16", [held]), models=models | {"b": {"pool": "bf16"}}, pools=settings
    ) as served:
        first = asyncio.create_task(ask(served, "0.3", model="b"))
        await until(lambda: held.running)
        assert (await served.events("/v1/completions", BODY | {"model": "m"}))[-1] == "[DONE]"
        assert (await first)[0] == 504


async def test_an_answered_request_has_no_deadline() -> None:
    async with in_process(("fake", [Scripted(whole())]), pools=within(total=0.05)) as served:
        assert (await ask(served))[0] == 200
        await asyncio.sleep(0.1)  # in the same task, which a forgotten timer would cancel


async def test_a_cancellation_by_others_is_not_taken_for_ours() -> None:
    async def worker(by_others: bool) -> bool:
        deadlines = Deadlines(60)
        try:
            asyncio.get_running_loop().call_soon(deadlines.disconnected)
            if by_others:
                asyncio.get_running_loop().call_soon(tasks[0].cancel)
            await asyncio.sleep(1)
        except asyncio.CancelledError:
            return deadlines.caught()
        finally:
            deadlines.close()
        return False

    for by_others in (False, True):
        tasks = [asyncio.create_task(worker(by_others))]
        assert await tasks[0] is not by_others


@pytest.mark.parametrize("stage", ["inter_token", "total"])
async def test_after_the_first_token_a_deadline_is_an_error_event(stage: str) -> None:
    stalling = Scripted([chunk("a"), chunk("b"), None])
    async with in_process(("fake", [stalling]), pools=within(**{stage: 0.3})) as served:
        now = asyncio.get_running_loop().time
        started = now()
        *events, last = await served.events("/v1/completions", BODY)
        assert 0.25 < now() - started < 0.55
        assert len(events) == 2
        error = json.loads(last)["error"]
        assert error["code"] == "deadline_exceeded"
        said = "was silent for 0.3 s" if stage == "inter_token" else "the deadline of 0.3 s passed"
        assert said in error["message"] and error["message"].endswith("; 2 tokens had been sent")
        assert deadlines(served) == {stage: 1}
        assert stalling.running == 0


async def test_silence_is_counted_anew_with_each_event() -> None:
    steady = Scripted([0.06, chunk()] * 8 + [0.06, DONE])
    async with in_process(("fake", [steady]), pools=within(inter_token=0.2)) as served:
        events = await served.events("/v1/completions", BODY)
        assert events[-1] == "[DONE]" and len(events) == 9
        assert deadlines(served) == {}


async def test_a_comment_is_no_sign_of_life_of_a_model() -> None:
    """Its server goes on writing what keeps a connection open, as sse-starlette does."""
    hung = Scripted([chunk(), *[0.02, b": ping\r\n\r\n"] * 100])
    async with in_process(("fake", [hung]), pools=within(inter_token=0.2)) as served:
        reply = await served.request("/v1/completions", BODY | {"stream": True})
        assert b": ping" in reply.body and b"was silent for 0.2 s" in reply.body
        assert b"; 1 tokens had been sent" in reply.body
        assert deadlines(served) == {"inter_token": 1}


async def test_a_client_that_takes_its_time_is_no_silence_of_the_backend() -> None:
    flood = Scripted([chunk("x" * 60_000)] * 200 + [DONE])
    settings = within(inter_token=0.1)
    async with serving(("fake", [flood]), pools=settings) as served:
        body = BODY | {"stream": True}
        async with served.session.post("/v1/completions", json=body) as response:
            await asyncio.sleep(0.4)
            assert (await response.read()).endswith(DONE)
        assert await served.metric("octet_deadlines_total", stage="inter_token") == 0
