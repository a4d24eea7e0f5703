"""/v1/responses and /v1/messages through the gateway, with the official clients and without."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import openai
import pytest

from tests.fake_servers import FakeOpenAI, FakeTriton, running
from tests.fakes import fake_backend
from tests.serve.conftest import Served, serving
from tests.serve.in_process import in_process
from tests.serve.named_contract import (
    CHECKS,
    Check,
    anthropic,
    messages_client,
    responses_client,
)
from tests.serve.openai_clients import relay_to, triton_to
from tests.serve.proof.exams import FakeExam, FakeExams
from tests.serve.upstreams import Scripted
from tests.serve.waiting import until

SECRET = "sk-team"
SAID = [{"role": "user", "content": "abcdefgh"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/responses": {"model": "fake", "input": "abcdefgh", "max_output_tokens": 6},
    "/v1/messages": {"model": "fake", "messages": SAID, "max_tokens": 6},
    "/v1/messages/count_tokens": {"model": "fake", "messages": SAID},
}
ENDED = b'{"stop_reason":"end_turn"}'
EACH = pytest.mark.parametrize("path", list(BODIES)[:2])
PROMPT = 35  # tokens, with the fake model's template
ALL = pytest.mark.parametrize("path", BODIES)


def key(**limits: Any) -> dict[str, Any]:
    digest = hashlib.sha256(SECRET.encode()).hexdigest()
    return {"keys": [{"name": "team", "sha256": digest} | limits]}


def faulty(path: str, fault: str, **more: Any) -> dict[str, Any]:
    said = {"input": fault} if path == "/v1/responses" else {"messages": user(fault)}
    return BODIES[path] | said | more


def user(text: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def message_of(path: str, answer: dict[str, Any], kind: str = "") -> str:
    """The message of an error in the protocol's form; of Anthropic's also the type."""
    if path == "/v1/responses":
        assert answer.keys() == {"error"}
    else:
        assert answer.keys() == {"type", "error"} and answer["type"] == "error"
        assert answer["error"].keys() == {"type", "message"}
        assert not kind or answer["error"]["type"] == kind
    return str(answer["error"]["message"])


@asynccontextmanager
async def gateway(*servers: FakeOpenAI, **settings: Any) -> AsyncIterator[Served]:
    async with AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(running(server))
        backends: list[Any] = [relay_to(server.url) for server in servers]
        yield await stack.enter_async_context(serving(("fake", backends), **settings))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("behind", [False, True], ids=["server", "gateway"])
async def test_contract(behind: bool, check: Check) -> None:
    """The same checks pass on a real vLLM: tests/integration/test_named_routes.py."""
    if not behind:
        async with running(FakeOpenAI()) as server:
            await check(server.url, "fake", "def f(x):")
        return
    models = {"alias": {"pool": "fake"}}
    async with gateway(FakeOpenAI(), models=models) as served:
        await check(served.url, "alias", "def f(x):")


@EACH
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_tokens_are_charged_and_measured_as_the_backend_counts_them(
    path: str, stream: bool
) -> None:
    headers = {"authorization": f"Bearer {SECRET}"}
    body = BODIES[path] | {"stream": stream, "ignore_eos": True, "temperature": 0}
    async with gateway(FakeOpenAI(), access=key(tokens_per_day=1000)) as served:
        async with served.session.post(path, json=body, headers=headers) as answer:
            assert answer.status == 200
            assert answer.headers["x-octet-backend"] == "fake/fake-1"
            assert answer.headers["x-request-id"]
            await answer.read()
        labels = {"key": "team", "model": "fake", "backend": "fake-1", "precision": ""}
        counted = labels | {"counted": "backend"}
        assert await served.metric("octet_tokens_total", type="input", **counted) == PROMPT
        assert await served.metric("octet_tokens_total", type="output", **counted) == 6
        done = {"endpoint": path, "model": "fake", "status": "200"}
        assert await served.metric("octet_requests_total", **done) == 1
        gaps = {"gen_ai_operation_name": "chat", "gen_ai_request_model": "fake", "pool": "fake"}
        assert await served.metric("octet_inter_token_latency_seconds_count", **gaps) == (
            4 if stream else 0  # the first two tokens are one character
        )
        assert served.gateway.keys.usage.spent("team") == PROMPT + 6


@EACH
@pytest.mark.parametrize("limit", [1, "none"])
async def test_a_limit_of_another_protocol_makes_no_answer_cheaper(path: str, limit: Any) -> None:
    """Servers ignore it, so what they count may exceed it."""
    other = "max_tokens" if path == "/v1/responses" else "max_output_tokens"
    body = BODIES[path] | {other: limit, "max_completion_tokens": limit, "ignore_eos": True}
    headers = {"authorization": f"Bearer {SECRET}"}
    async with gateway(FakeOpenAI(), access=key(tokens_per_day=1000)) as served:
        async with served.session.post(path, json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
        assert served.gateway.keys.usage.spent("team") == PROMPT + 6


@EACH
async def test_a_client_that_leaves_is_charged_for_what_it_had_and_frees_the_backend(
    path: str,
) -> None:
    server = FakeOpenAI(delay_s=0.01)
    headers = {"authorization": f"Bearer {SECRET}"}
    limit = {"max_output_tokens": 400, "max_tokens": 400}
    body = BODIES[path] | limit | {"stream": True, "ignore_eos": True}
    async with gateway(server, access=key(tokens_per_day=1000)) as served:
        async with served.session.post(path, json=body, headers=headers) as answer:
            seen = b""
            async for line in answer.content:
                seen += line
                if seen.count(b"event: ") > 8:
                    break
            answer.close()
        await until(lambda: server.cancelled == 1)
        await served.idle()
        assert 4 <= served.gateway.keys.usage.spent("team") < 100
        gone = {"endpoint": path, "model": "fake", "status": "499"}
        assert await served.metric("octet_requests_total", **gone) == 1


@EACH
@pytest.mark.parametrize("fault", ["!die", "!midreset"])
async def test_a_backend_that_breaks_off_ends_the_stream_in_an_error(path: str, fault: str) -> None:
    async with gateway(FakeOpenAI()) as served:
        body = faulty(path, fault, stream=True)
        async with served.session.post(path, json=body) as answer:
            text = await answer.text()
        *before, last, nothing = text.split("\n\n")
        assert nothing == ""
        name, data = last.split("\n")
        error = json.loads(data.removeprefix("data: "))
        assert name == "event: error" and error["type"] == "error"
        if path == "/v1/responses":
            assert error["sequence_number"] == len(before) and "fake-1" in error["message"]
        else:
            assert error["error"]["type"] == "api_error" and "fake-1" in error["error"]["message"]


async def test_official_clients_see_the_error_in_mid_stream() -> None:
    async with gateway(FakeOpenAI()) as served:
        for fault in ("!die", "!inside"):
            async with responses_client(served.url) as client:
                stream = await client.responses.create(model="fake", input=fault, stream=True)
                types = [event.type async for event in stream]
                assert types[0] == "response.created" and types[-1] == "error"
            async with messages_client(served.url) as client:
                stream = await client.messages.create(
                    model="fake", max_tokens=9, messages=user(fault), stream=True
                )
                with pytest.raises(anthropic.APIStatusError, match=r"fake-1|it broke inside"):
                    _ = [event async for event in stream]
        broken = await served.metric("octet_broken_streams_total", model="fake")
        assert broken == 4


@EACH
@pytest.mark.parametrize("fault", ["!early", "!empty", "!hangup", "!error", "!html"])
async def test_before_the_first_token_another_backend_is_tried(path: str, fault: str) -> None:
    """The first one fails on every request; the second takes the fault for a prompt."""

    class Sound(FakeOpenAI):
        async def _read(self, request: Any) -> dict[str, Any]:
            body = await super()._read(request)
            return json.loads(json.dumps(body).replace("!", ""))  # type: ignore[no-any-return]

    bad, sound = FakeOpenAI(), Sound()
    async with gateway(bad, sound) as served:
        for _ in range(2):
            body = faulty(path, fault, stream=True)
            async with served.session.post(path, json=body) as answer:
                assert answer.status == 200 and "error" not in (text := await answer.text())
                assert text.count("event: response.created") + text.count("message_start") >= 1
        assert bad.requests and len(sound.requests) == 2


@ALL
async def test_who_does_not_have_it_says_so_and_who_has_it_is_asked(path: str) -> None:
    body = BODIES[path]
    async with running(FakeOpenAI()) as able, running(FakeTriton()) as triton:
        async with running(FakeOpenAI(flavour="sglang")) as without:
            others: list[Any] = [fake_backend(), triton_to(triton.url), relay_to(without.url)]
            for backend in others:
                async with serving(("fake", [backend])) as served:
                    status, answer = await served.post(path, body)
                    message = message_of(path, answer)
                    assert status in (400, 404) and f"does not have {path}" in message
            again: list[Any] = [fake_backend(), triton_to(triton.url), relay_to(without.url)]
            async with serving(("fake", [*again, relay_to(able.url)])) as served:
                for _ in range(4):
                    assert (await served.post(path, body))[0] == 200
        assert len(able.requests) == 4


@ALL
async def test_a_fallback_pool_answers_what_the_first_does_not_have(path: str) -> None:
    models = {"fake": {"pool": "first", "fallback": ["second"]}}
    async with running(FakeOpenAI()) as able:
        pools: Any = (("first", [fake_backend()]), ("second", [relay_to(able.url)]))
        async with (
            serving(*pools, models=models) as served,
            served.session.post(path, json=BODIES[path]) as answer,
        ):
            assert answer.status == 200
            assert answer.headers["x-octet-backend"] == "second/second-1"


REFUSED: list[tuple[str, Any, int, str, str]] = [
    ("/v1/responses", {"model": "other"}, 404, "other", ""),
    ("/v1/responses", b"{", 400, "not valid JSON", ""),
    ("/v1/responses", {"input": None}, 400, "'input'", ""),
    ("/v1/responses", {"input": []}, 400, "'input'", ""),
    ("/v1/responses", {"input": ["a"]}, 400, "'input'", ""),
    ("/v1/responses", {"max_output_tokens": 0}, 400, "'max_output_tokens'", ""),
    ("/v1/responses", {"top_logprobs": 21}, 400, "'top_logprobs'", ""),
    ("/v1/responses", {"stream": 1}, 400, "'stream'", ""),
    ("/v1/responses", {"tools": "x"}, 400, "'tools'", ""),
    ("/v1/responses", {"previous_response_id": "resp_1"}, 400, "'previous_response_id'", ""),
    ("/v1/responses", {"conversation": {"id": "c"}}, 400, "'conversation'", ""),
    ("/v1/responses", {"background": True}, 400, "'background'", ""),
    ("/v1/responses", {"store": True}, 400, "'store'", ""),
    ("/v1/messages", {"model": "other"}, 404, "other", "not_found_error"),
    ("/v1/messages", b"[]", 400, "JSON object", "invalid_request_error"),
    ("/v1/messages", {"max_tokens": None}, 400, "'max_tokens'", "invalid_request_error"),
    ("/v1/messages", {"messages": []}, 400, "'messages'", "invalid_request_error"),
    ("/v1/messages", {"system": 3}, 400, "'system'", "invalid_request_error"),
    ("/v1/messages/count_tokens", {"messages": "x"}, 400, "'messages'", "invalid_request_error"),
]


async def test_what_is_refused() -> None:
    backend = Scripted(b"{}")
    async with in_process(("fake", [backend])) as served:
        for path, fields, expected, told, kind in REFUSED:
            raw = isinstance(fields, bytes)
            body = fields if raw else json.dumps(BODIES[path] | fields).encode()
            reply = await served.request(path, body)
            assert reply.status == expected, (fields, reply.body)
            assert told in message_of(path, reply.json(), kind), (fields, reply.body)
    assert backend.asked == 0


@ALL
async def test_errors_of_every_kind_are_in_the_form_of_the_protocol(path: str) -> None:
    cases: list[tuple[Any, int, str]] = [
        ((400, b'{"error":{"message":"no such tool","code":400}}'), 400, "invalid_request_error"),
        ((429, b'{"error":{"message":"slowly"}}'), 429, "rate_limit_error"),
        ((500, b'{"error":{"message":"it broke"}}'), 500, "api_error"),
        ((503, b"busy"), 503, "overloaded_error"),
        ((501, b'{"error":{"message":"cannot"}}'), 400, "invalid_request_error"),
        ((404, b'{"detail":"Not Found"}'), 404, "not_found_error"),
        (b"no JSON", 502, "api_error"),
    ]
    for outcome, expected, kind in cases:
        async with in_process(("fake", [Scripted(outcome)])) as served:
            reply = await served.request(path, BODIES[path])
            assert reply.status == expected, (outcome, reply.body)
            assert message_of(path, reply.json(), kind)
            assert "10.0.0.1" not in str(reply.body)


@ALL
async def test_a_wrong_method_and_no_key_are_told_in_the_form_of_the_protocol(path: str) -> None:
    async with gateway(FakeOpenAI(), access=key()) as served:
        async with served.session.get(path) as answer:
            assert answer.status == 405 and "GET" in message_of(path, await answer.json())
        status, refused = await served.post(path, BODIES[path])
        assert status == 401 and message_of(path, refused, "authentication_error")


@ALL
async def test_only_a_proven_backend_gets_it(path: str) -> None:
    servers: list[Any] = [Scripted(ENDED, address=f"10.0.0.{n}:80") for n in (1, 2)]
    wrong, right = (server.name for server in servers)
    exam = FakeExam(seconds=0, says={wrong: "worse"})
    async with in_process(("fake", servers), exams=FakeExams(exam)) as served:
        for _ in range(4):
            reply = await served.request(path, BODIES[path])
            assert reply.status == 200
            assert reply.headers["x-octet-artifact"] == exam.identity[:12]
    assert [server.asked for server in servers] == [0, 4]
    exam = FakeExam(seconds=0, says={wrong: "worse", right: "worse"})
    async with in_process(("fake", servers), exams=FakeExams(exam)) as served:
        reply = await served.request(path, BODIES[path])
        assert reply.status == 503
        assert "is proven (2 refused)" in message_of(path, reply.json(), "overloaded_error")


async def test_stored_responses_are_nowhere() -> None:
    async with gateway(FakeOpenAI()) as served, responses_client(served.url) as client:
        for call in (client.responses.retrieve, client.responses.cancel, client.responses.delete):
            with pytest.raises(openai.NotFoundError, match="no response is stored here"):
                await call("resp_1")


async def test_no_backend_is_asked_to_store_and_the_rest_goes_out_as_it_came() -> None:
    server = FakeOpenAI()
    async with gateway(server) as served:
        raw = b'{"model":"fake",  "input":"a","max_output_tokens":1,"x":{"stream_options":0}}'
        for body in (raw, raw.replace(b'"x"', b'"store":null,"x"'), raw.replace(b"x", b"\\u0078")):
            assert (await served.post("/v1/responses", body))[0] == 200
        assert [request["store"] for request in server.requests] == [False] * 3
        assert all(request["x"] == {"stream_options": 0} for request in server.requests)
        assert (await served.post("/v1/messages", BODIES["/v1/messages"]))[0] == 200
        assert server.requests[-1] == BODIES["/v1/messages"]


async def test_an_x_api_key_is_a_key_of_messages_alone() -> None:
    server = FakeOpenAI()
    async with gateway(server, access=key()) as served:
        async with messages_client(served.url, SECRET) as client:
            body = BODIES["/v1/messages"]
            assert (await client.messages.create(**body)).usage.output_tokens
            counted = BODIES["/v1/messages/count_tokens"]
            assert (await client.messages.count_tokens(**counted)).input_tokens
        assert "x-api-key" not in server.headers[-1]  # it is the gateway's
        async with messages_client(served.url, "sk-other") as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(**body)
        both = {"x-api-key": SECRET, "authorization": f"Bearer {SECRET}"}
        async with served.session.post("/v1/messages", json=body, headers=both) as answer:
            assert answer.status == 400
            assert "more than one API key" in message_of("/v1/messages", await answer.json())
        for path in ("/v1/responses", "/v1/chat/completions"):
            send = {"json": BODIES["/v1/responses"], "headers": {"x-api-key": SECRET}}
            async with served.session.post(path, **send) as answer:
                assert answer.status == 401


@EACH
async def test_prompts_count_before_the_answer(path: str) -> None:
    """Instructions and tools too: by limits of prompts, by rates, and by the day's tokens."""
    long = "word " * 400  # 500 tokens
    first = "instructions" if path == "/v1/responses" else "system"
    tools = [{"name": "f", "description": long, "input_schema": {}}]
    backend = Scripted(b"{}")
    for fields in ({first: long}, {"tools": tools}, faulty(path, long)):
        body = BODIES[path] | fields
        async with in_process(("fake", [backend]), limits={"max_prompt_tokens": 400}) as served:
            reply = await served.request(path, body)
            assert reply.status == 400 and "about 5" in message_of(path, reply.json())
        headers = {"authorization": f"Bearer {SECRET}"}
        for limit in ("tokens_per_minute", "tokens_per_day"):
            async with in_process(("fake", [backend]), access=key(**{limit: 400})) as served:
                reply = await served.request(path, body, headers)
                assert reply.status in (400, 429), reply.body
                assert message_of(path, reply.json())
    assert backend.asked == 0


async def test_a_used_up_quota_is_a_rate_limit_error_to_the_official_clients() -> None:
    async with gateway(FakeOpenAI(), access=key(requests_per_minute=1)) as served:
        async with messages_client(served.url, SECRET) as client:
            await client.messages.create(**BODIES["/v1/messages"])
            with pytest.raises(anthropic.RateLimitError) as refused:
                await client.messages.create(**BODIES["/v1/messages"])
            assert refused.value.body["error"]["type"] == "rate_limit_error"
            assert int(refused.value.response.headers["retry-after"]) > 0
        async with responses_client(served.url, SECRET) as other:
            with pytest.raises(openai.RateLimitError):
                await other.responses.create(**BODIES["/v1/responses"])


@EACH
@pytest.mark.parametrize("policy", ["prefix", "session"])
async def test_a_conversation_stays_at_its_backend(path: str, policy: str) -> None:
    first = "instructions" if path == "/v1/responses" else "system"
    backends: list[Any] = [Scripted(ENDED, address=f"10.0.0.{i}:80") for i in range(4)]
    routing = {"fake": {"routing": {"policy": policy, "prefix_chars": 64}}}
    async with in_process(("fake", backends), pools=routing) as served:
        for user_number in range(8):
            for backend in backends:
                backend.asked = 0
            for turn in range(4):
                more: dict[str, Any] = {"metadata": {"user_id": f"u{user_number}"}}
                if policy == "prefix":
                    more = {first: f"You are number {user_number}. " * 4}
                body = faulty(path, f"turn {turn}") | more
                await served.request(path, body)
            assert sorted(bool(backend.asked) for backend in backends) == [False] * 3 + [True]


async def test_cancelled_requests_leave_nothing_behind(
    upstreams: list[FakeOpenAI],
) -> None:
    backends: list[Any] = [relay_to(server.url) for server in upstreams]
    async with serving(("fake", backends)) as served:
        limit = {"max_output_tokens": 300, "max_tokens": 300, "ignore_eos": True}

        async def one(number: int) -> None:
            path = list(BODIES)[number % 2]
            body = BODIES[path] | limit | {"stream": number % 4 < 2}
            try:
                async with asyncio.timeout(0.02 * (1 + number % 7)):
                    async with served.session.post(path, json=body) as answer:
                        await answer.read()
            except TimeoutError:
                pass

        await asyncio.gather(*(one(number) for number in range(40)))
        await served.idle()
        await until(lambda: all(server.running == 0 for server in upstreams))
        members = served.gateway.pools["fake"].members
        assert all(m.in_flight == 0 and m.outstanding_tokens == 0 for m in members)
