"""Tests that requests to OpenAI servers pass through, with features beyond generating text.

The bytes of a request arrive as they were sent, and those of its answer as they were written; a
backend that cannot honour a field refuses it by name.
"""

import json
from typing import Any

from serve.backends.triton_grpc import TritonBackend
from tests.fake_servers import FakeTriton, running
from tests.fakes import fake_backend
from tests.serve.conftest import Served, serving
from tests.serve.openai_clients import relay_to
from tests.serve.upstreams import DONE, JSON_HEAD, STREAM_HEAD, scripted, send
from tests.triton_config import triton_at

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": True,
    },
}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
SOUND = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
SCHEMA = {"name": "city", "schema": {"type": "object", "additionalProperties": False}}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
# What it is -> the body's fields, and the one that a backend which cannot refuses by name.
CHATS: dict[str, tuple[dict[str, Any], str]] = {
    "tools": ({"tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": False}, "tools"),
    "a tool's result": (
        {
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": '{"sky": "\u2601"}'},
            ]
        },
        "messages.1.tool_calls",
    ),
    "a schema": (
        {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
        "response_format",
    ),
    "structured outputs": ({"structured_outputs": {"regex": "[a-z]+\\d"}}, "structured_outputs"),
    "guided": ({"guided_choice": ["yes", "no"]}, "guided_choice"),
    "pictures": ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content"),
    "sound": ({"messages": [{"role": "user", "content": [SOUND]}]}, "messages.0.content"),
    "spoken answers": ({"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
    "reasoning": ({"reasoning_effort": "high"}, "reasoning_effort"),
    "prompt_logprobs": ({"prompt_logprobs": 2}, "prompt_logprobs"),
    "a template": ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
    "an extension": ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
    "numbers": ({"logit_bias": {"50256": -1e2}, "min_p": 0.10000000000000001}, "logit_bias"),
}
LOGPROBS = {
    "content": [{"token": "é", "logprob": -0.25, "bytes": [195, 169], "top_logprobs": []}],
    "refusal": None,
}
WHOLE = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "fake",
    "choices": [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": None,
                "reasoning": "hm",
                "reasoning_content": "hm",
                "tool_calls": [CALL],
            },
            "logprobs": LOGPROBS,
            "finish_reason": "tool_calls",
            "stop_reason": None,
        }
    ],
    "prompt_logprobs": [None, {"5": {"logprob": -1.0, "rank": 1, "decoded_token": "a"}}],
    "usage": {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6},
    "kv_transfer_params": {"remote": "x"},
}


def _chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "fake"}
    return head | {"choices": [choice]}


def _arguments(text: str) -> dict[str, Any]:
    return {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}


CHUNKS = [
    _chunk({"role": "assistant", "content": "", "reasoning": "let me"}),
    _chunk(
        {"tool_calls": [{"index": 0} | CALL | {"function": {"name": "weather", "arguments": ""}}]}
    ),
    *(_chunk(_arguments(text)) for text in ('{"ci', 'ty": "K', "ö\u2028ln", '"}')),
    _chunk({}, "tool_calls"),
]
USAGE = _chunk({}) | {"choices": [], "usage": WHOLE["usage"]}


ANSWER = json.dumps(WHOLE, ensure_ascii=False, indent=1).encode()
EVENTS = "".join(f"data: {json.dumps(c, ensure_ascii=False)}\n\n" for c in CHUNKS).encode()
COUNTED = f"data: {json.dumps(USAGE)}\n\n".encode()
STREAM = EVENTS + COUNTED + DONE
ANSWERED = send(JSON_HEAD, ANSWER)
STREAMED = send(STREAM_HEAD, *(STREAM[i : i + 37] for i in range(0, len(STREAM), 37)))
PATH = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


async def answer_of(served: Served, raw: bytes) -> bytes:
    async with served.session.post(PATH, data=raw, headers=JSON) as answer:
        assert answer.status == 200
        return await answer.read()


async def test_the_bytes_of_requests_and_answers_are_the_same() -> None:
    async with (
        scripted(ANSWERED) as upstream,
        serving(("fake", [relay_to(upstream.url, type="openai")])) as served,
    ):
        for fields, _ in CHATS.values():
            body = {"model": "fake"} | CHAT | fields
            for text in (json.dumps(body), json.dumps(body, ensure_ascii=False, indent=2)):
                assert await answer_of(served, text.encode()) == ANSWER
                assert upstream.bodies.pop() == text.encode()


async def test_the_bytes_of_streams_are_the_same() -> None:
    async with (
        scripted(STREAMED) as upstream,
        serving(("fake", [relay_to(upstream.url, type="openai")])) as served,
    ):
        for fields, _ in CHATS.values():
            body = {"model": "fake", "stream": True} | CHAT | fields
            counted = body | {"stream_options": {"include_usage": True}}
            raw = json.dumps(counted).encode()
            assert await answer_of(served, raw) == STREAM
            assert upstream.bodies.pop() == raw
            # Where the client did not ask for usage, the gateway does, and keeps it to itself.
            assert await answer_of(served, json.dumps(body).encode()) == EVENTS + DONE
            assert json.loads(upstream.bodies.pop()) == counted


async def test_a_backend_that_cannot_refuses_by_name() -> None:
    async with running(FakeTriton()) as server:
        triton = TritonBackend("triton", triton_at(server.url, model="fake"))
        pools = ("embedded", [fake_backend(model="embedded")]), ("triton", [triton])
        async with serving(*pools) as served:
            for model in ("embedded", "triton"):
                for what, (fields, param) in CHATS.items():
                    status, answer = await served.post(
                        "/v1/chat/completions", {"model": model} | CHAT | fields
                    )
                    assert (status, answer["error"]["param"]) == (400, param), (model, what, answer)
                    assert answer["error"]["code"] in ("unsupported_field", "unknown_field")
        assert not server.requests


async def test_what_describes_the_caller_is_no_reason_to_refuse() -> None:
    fields = {"metadata": {"run": "1"}, "store": True, "user": "me", "prompt_cache_key": "k"}
    named = {"messages": [{"role": "user", "name": "ann", "content": "hi"}], "max_tokens": 2}
    async with serving(("fake", [fake_backend()])) as served:
        status, answer = await served.post(
            "/v1/chat/completions", {"model": "fake"} | named | fields
        )
        assert status == 200, answer
        named["messages"][0]["name"] = 3
        status, answer = await served.post("/v1/chat/completions", {"model": "fake"} | named)
        assert (status, answer["error"]["param"]) == (400, "messages.0.name")
