"""Answers that a server ends because it stops, as vLLM does at SIGTERM: 200, with `abort`."""

import json
from dataclasses import replace
from typing import Any

import pytest

from serve.engine.request import Finished
from tests.fake_servers import FakeTriton, running
from tests.serve.api.request.test_attempts import BODY, NO_BUDGET, TURNS, pools
from tests.serve.in_process import in_process
from tests.serve.openai_clients import triton_to
from tests.serve.upstreams import DONE, Scripted, chunk, whole

SETTINGS = pools(retries=NO_BUDGET, routing=TURNS)
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def text_event(text: str, reason: str | None) -> bytes:
    return event({"index": 0, "text": text, "finish_reason": reason})


def chat_event(reason: str | None = None, **delta: Any) -> bytes:
    return event({"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason})


def event(*choices: dict[str, Any]) -> bytes:
    """With the spaces that some servers write."""
    return b"data: " + json.dumps({"model": "fake", "choices": choices}).encode() + b"\n\n"


USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":0}}\n\n'
ABORTED = text_event("", "abort")
ROLE = chat_event(role="assistant", content="")
GOOD_CHAT = [ROLE, chat_event(content="good"), chat_event("stop"), DONE]

# What the first backend answers with, and what the second one.
BEFORE_A_TOKEN = {
    "whole": (False, whole("").replace(b'"stop"', b'"abort"'), whole("good")),
    "large": (False, whole("x" * 100_000).replace(b'"stop"', b'"abort"'), whole("good")),
    "one of two": (
        False,
        json.dumps(
            {"choices": [{"text": "a", "finish_reason": r} for r in ("stop", "abort")]}
        ).encode(),
        whole("good"),
    ),
    "stream": (True, [ABORTED, DONE], [chunk("good"), DONE]),
    "stream in one piece": (True, [ABORTED + DONE], [chunk("good"), DONE]),
    # vLLM leaves out what has no token, and so the reason.
    "nothing": (True, [DONE], [chunk("good"), DONE]),
    "usage alone": (True, [USAGE, DONE], [chunk("good"), DONE]),
    "usage alone in one piece": (True, [USAGE + DONE], [chunk("good"), DONE]),
    "chat of a role alone": (True, [ROLE, USAGE, DONE], GOOD_CHAT),
    "chat": (True, [ROLE, chat_event("abort"), DONE], GOOD_CHAT),
    "chat in one piece": (True, [ROLE + chat_event("abort") + DONE], GOOD_CHAT),
    "chat of two": (True, [ROLE, ROLE, chat_event("abort"), DONE], GOOD_CHAT),
}


@pytest.mark.parametrize(("stream", "first", "second"), BEFORE_A_TOKEN.values(), ids=BEFORE_A_TOKEN)
async def test_who_is_aborted_before_the_first_token_is_answered_by_another(
    stream: bool, first: Any, second: Any
) -> None:
    stopping, sound = Scripted(first), Scripted(second)
    chats = second is GOOD_CHAT
    path = "/v1/chat/completions" if chats else "/v1/completions"
    async with in_process(("fake", [stopping, sound]), pools=SETTINGS) as served:
        for _ in range(4):
            reply = await served.request(path, (CHAT if chats else BODY) | {"stream": stream})
            assert reply.status == 200 and b"good" in reply.body and b"abort" not in reply.body
        assert 1 <= stopping.asked <= 2 and sound.asked == 4
        assert served.metric("octet_retries_total", pool="fake", reason="lost") == stopping.asked
    async with in_process(("fake", [Scripted(first)]), pools=SETTINGS) as served:
        reply = await served.request(path, (CHAT if chats else BODY) | {"stream": stream})
        assert reply.status == 502 and b"fake-1: aborted the request" in reply.body
    for usage in (True, False) if stream else ():
        asked = {"stream": True, "stream_options": {"include_usage": usage}}
        async with in_process(
            ("fake", [Scripted(first), Scripted(second)]), pools=SETTINGS
        ) as served:
            for _ in range(2):
                reply = await served.request(path, (CHAT if chats else BODY) | asked)
                assert b"good" in reply.body and b'"completion_tokens":0' not in reply.body


@pytest.mark.parametrize("at_once", [False, True], ids=["apart", "in one piece"])
async def test_an_error_after_the_role_alone_is_none_of_the_clients(at_once: bool) -> None:
    """The network decides which events come together."""
    error = b'data: {"error":{"message":"EngineCore encountered an issue","code":500}}\n\n'
    answer = [ROLE + error + DONE] if at_once else [ROLE, error, DONE]
    dying, sound = Scripted(answer), Scripted(GOOD_CHAT)
    async with in_process(("fake", [dying, sound]), pools=SETTINGS) as served:
        for _ in range(4):
            reply = await served.request("/v1/chat/completions", CHAT | {"stream": True})
            assert reply.status == 200 and b"good" in reply.body and b"error" not in reply.body
        assert (dying.asked, sound.asked) == (1, 4)


@pytest.mark.parametrize("at_once", [False, True], ids=["apart", "in one piece"])
async def test_after_the_first_token_an_abort_is_an_error_event(at_once: bool) -> None:
    last = [chunk("b") + ABORTED + DONE] if at_once else [chunk("b"), ABORTED, DONE]
    async with in_process(("fake", [Scripted([chunk("a"), *last])]), pools=SETTINGS) as served:
        first, second, error = await served.events("/v1/completions", BODY)
        assert [json.loads(e)["choices"][0]["text"] for e in (first, second)] == ["a", "b"]
        assert "fake-1: aborted the request" in json.loads(error)["error"]["message"]
        assert served.metric("octet_broken_streams_total", model="fake") == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_text_about_aborting_is_only_a_text(stream: bool) -> None:
    text = '"finish_reason": "abort"'
    logprobs = {"top_logprobs": [{"abort": -0.5}], "tokens": ["abort"]}
    choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": "stop"}
    answer = [event(choice), DONE] if stream else json.dumps({"choices": [choice]}).encode()
    async with in_process(("fake", [Scripted(answer)])) as served:
        reply = await served.request("/v1/completions", BODY | {"stream": stream})
        body = b"".join(answer) if isinstance(answer, list) else answer
        assert (reply.status, reply.body) == (200, body)


class Stopping(FakeTriton):
    """As Triton's vLLM backend, whose engine aborts what it has."""

    def write(self, event: Any, *arguments: Any) -> Any:
        if isinstance(event, Finished):
            event = replace(event, reason="abort")
        return super().write(event, *arguments)


async def test_what_a_model_of_triton_aborts_is_answered_by_another() -> None:
    async with running(Stopping()) as triton:
        stopping = triton_to(triton.url)
        async with in_process(("fake", [stopping, Scripted(whole("good"))]), pools=SETTINGS) as it:
            for _ in range(4):
                reply = await it.request("/v1/completions", BODY)
                assert reply.status == 200 and b"good" in reply.body
        assert triton.requests
