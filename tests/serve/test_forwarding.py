"""What a backend of OpenAI's protocol can do more than generate text goes through it unharmed.

The bytes of a request arrive as they were sent, and those of its answer as they were written; a
backend that cannot honour a field refuses it by name.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from openai import AsyncOpenAI

from serve.backends.openai_http import OpenAiHttpBackend
from serve.backends.triton_grpc import TritonBackend
from serve.config import HttpConfig
from tests.fake_servers import FakeTriton, running
from tests.fakes import fake_backend
from tests.serve.conftest import Served, serving
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


class Upstream:
    """A server that answers each request with the same bytes, and keeps what it was sent."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.answer = json.dumps(WHOLE, ensure_ascii=False, indent=1).encode()
        dumped = [json.dumps(chunk, ensure_ascii=False) for chunk in CHUNKS]
        self.events = "".join(f"data: {text}\n\n" for text in dumped).encode()
        self.usage = f"data: {json.dumps(USAGE)}\n\n".encode()
        self.done = b"data: [DONE]\n\n"

    async def handle(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        self.received.append(raw)
        body = json.loads(raw)
        if not body.get("stream"):
            return web.Response(body=self.answer, content_type="application/json")
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        asked = (body.get("stream_options") or {}).get("include_usage")
        stream = self.events + (self.usage if asked else b"") + self.done
        for start in range(0, len(stream), 37):
            await response.write(stream[start : start + 37])
        return response

    @asynccontextmanager
    async def served(self) -> AsyncIterator[Served]:
        app = web.Application()
        app.router.add_post("/{path:.*}", self.handle)
        app.router.add_get("/{path:.*}", _alive)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        backend = OpenAiHttpBackend("fake", HttpConfig(type="openai", url=url))
        try:
            async with serving(("fake", [backend])) as served:
                yield served
        finally:
            await runner.cleanup()


async def _alive(_request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": []})


async def test_the_bytes_of_requests_and_answers_are_the_same() -> None:
    upstream = Upstream()
    async with upstream.served() as served:
        for path, fields in [("/v1/chat/completions", f) for f, _ in CHATS.values()]:
            body = {"model": "fake"} | CHAT | fields
            for raw in (json.dumps(body), json.dumps(body, ensure_ascii=False, indent=2)):
                headers = {"content-type": "application/json"}
                async with served.session.post(path, data=raw.encode(), headers=headers) as answer:
                    assert answer.status == 200 and await answer.read() == upstream.answer
                assert upstream.received.pop() == raw.encode()


async def test_the_bytes_of_streams_are_the_same() -> None:
    upstream = Upstream()
    async with upstream.served() as served:
        for fields, _ in CHATS.values():
            body = {"model": "fake", "stream": True} | CHAT | fields
            counted = body | {"stream_options": {"include_usage": True}}
            raw = json.dumps(counted).encode()
            async with served.session.post(
                "/v1/chat/completions", data=raw, headers=JSON
            ) as answer:
                expected = upstream.events + upstream.usage + upstream.done
                assert await answer.read() == expected
            assert upstream.received.pop() == raw
            # Where the client did not ask for usage, the gateway does, and keeps it to itself.
            raw = json.dumps(body).encode()
            async with served.session.post(
                "/v1/chat/completions", data=raw, headers=JSON
            ) as answer:
                assert await answer.read() == upstream.events + upstream.done
            assert json.loads(upstream.received.pop()) == counted


JSON = {"content-type": "application/json"}


async def test_the_official_client_reads_tool_calls() -> None:
    upstream = Upstream()
    async with (
        upstream.served() as served,
        AsyncOpenAI(base_url=f"{served.url}/v1", api_key="-") as client,
    ):
        ask: dict[str, Any] = {"model": "fake", "tools": [TOOL], **CHAT}
        whole = await client.chat.completions.create(**ask)
        assert whole.choices[0].finish_reason == "tool_calls"
        assert [call.to_dict() for call in whole.choices[0].message.tool_calls or ()] == [CALL]
        assert whole.choices[0].message.to_dict()["reasoning_content"] == "hm"
        assert whole.to_dict()["prompt_logprobs"] == WHOLE["prompt_logprobs"]
        arguments = reasoning = ""
        async for chunk in await client.chat.completions.create(**ask, stream=True):
            delta = chunk.choices[0].delta
            reasoning += delta.to_dict().get("reasoning", "")
            for call in delta.tool_calls or ():
                assert call.function is not None
                arguments += call.function.arguments or ""
        assert json.loads(arguments) == {"city": "Kö\u2028ln"} and reasoning == "let me"


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
