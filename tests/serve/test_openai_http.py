"""vLLM behind the gateway: bytes pass through, and whatever goes wrong is said."""

import asyncio
import json
import socket
from typing import Any

import aiohttp
import pytest
from openai import APIError, AsyncOpenAI

from octet.errors import BackendError, BackendUnavailable, ConfigError, RequestError
from serve.backends.openai_http import OpenAiHttpBackend
from serve.config import HttpConfig
from serve.types import GenerateRequest
from tests.fake_servers import FakeOpenAI, running
from tests.fakes import fake_backend
from tests.serve.conftest import Served, serving

BODY = {"model": "fake", "prompt": "abc", "temperature": 0, "max_tokens": 12, "ignore_eos": True}


def relay_to(url: str, **settings: Any) -> OpenAiHttpBackend:
    return OpenAiHttpBackend("fake", HttpConfig(type="vllm", url=url, **settings))


def dead_url() -> str:
    """A URL of this machine where nobody listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{unused.getsockname()[1]}"


async def answer(url: str, body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    async with aiohttp.ClientSession() as session, session.post(url + path, json=body) as response:
        assert response.status == 200
        return await response.read()


CHAT = {k: v for k, v in BODY.items() if k != "prompt"} | {
    "messages": [{"role": "user", "content": "hi"}]
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", BODY), ("/v1/chat/completions", CHAT)]
)
async def test_bytes_pass_through_unchanged(path: str, body: dict[str, Any], stream: bool) -> None:
    body = body | {"stream": stream}
    async with running(FakeOpenAI()) as vllm:
        async with serving(("fake", [relay_to(vllm.url)])) as served:
            assert await answer(served.url, body, path) == await answer(vllm.url, body, path)
        assert vllm.requests[0] == vllm.requests[1]


async def test_an_alias_is_replaced_both_ways() -> None:
    async with running(FakeOpenAI()) as vllm:
        backend = relay_to(vllm.url, model="served")
        async with serving(("public", [backend])) as served:
            for stream in (False, True):
                body = BODY | {"model": "public", "stream": stream, "prompt": '"model":"served"'}
                direct = await answer(vllm.url, body | {"model": "served"})
                relayed = await answer(served.url, body)
                assert vllm.requests[-1]["model"] == "served"
                assert b'"served"' not in relayed and b'"public"' in relayed
                assert len(relayed.split(b"\n\n")) == len(direct.split(b"\n\n"))


async def test_unknown_fields_and_the_request_id_reach_vllm() -> None:
    extra = {"guided_regex": "a+", "made_up": [1], "presence_penalty": 0.5}
    async with running(FakeOpenAI()) as vllm, serving(("fake", [relay_to(vllm.url)])) as served:
        headers = {"X-Request-Id": "mine"}
        async with served.session.post(
            "/v1/completions", json=BODY | extra, headers=headers
        ) as response:
            assert response.status == 200
        assert vllm.requests[0] == BODY | extra
        assert vllm.headers[0]["x-request-id"] == "mine"


async def test_bad_requests_are_refused_before_vllm_sees_them() -> None:
    async with running(FakeOpenAI()) as vllm, serving(("fake", [relay_to(vllm.url)])) as served:
        status, _ = await served.post("/v1/completions", BODY | {"max_tokens": 0})
        assert (status, vllm.requests) == (400, [])


async def test_errors_keep_their_status_and_body() -> None:
    async with running(FakeOpenAI()) as vllm, serving(("fake", [relay_to(vllm.url)])) as served:
        status, error = await served.post("/v1/completions", BODY | {"prompt": "x" * 600})
        assert status == 400 and error["error"]["type"] == "BadRequestError"
        async with served.session.post(
            "/v1/completions", json=BODY | {"prompt": "!busy", "stream": True}
        ) as response:
            assert response.status == 503 and response.headers["Retry-After"] == "7"
            assert (await response.json())["error"]["message"] == "queue full"
        status, error = await served.post("/v1/completions", BODY | {"prompt": "!html"})
        assert status == 502 and "Bad Gateway" in error["error"]["message"]


@pytest.mark.parametrize("fault", ["!hangup", "!empty"])
async def test_a_failure_before_the_first_byte_goes_to_the_next_backend(fault: str) -> None:
    async with running(FakeOpenAI()) as broken, running(FakeOpenAI()) as sound:

        async def healthy(request: Any, body: Any) -> Any:
            return await FakeOpenAI._answer(sound, request, body | {"prompt": "abc"})

        sound._answer = healthy
        pool = [relay_to(broken.url), relay_to(sound.url)]
        async with serving(("fake", pool)) as served:
            body = BODY | {"prompt": f"{fault} abc", "stream": True}
            events = await served.events("/v1/completions", body)
            assert events[-1] == "[DONE]" and len(events) > 2
            assert broken.requests and sound.requests
            labels = {"model": "fake", "backend": pool[0].name}
            assert await served.metric("octet_backend_failovers_total", **labels) == 1


async def test_a_dead_backend_costs_no_request() -> None:
    async with running(FakeOpenAI()) as vllm:
        pool = [relay_to(dead_url()), relay_to(vllm.url)]
        async with serving(("fake", pool)) as served:
            for _ in range(4):
                status, _ = await served.post("/v1/completions", BODY)
                assert status == 200
            async with served.session.get("/ready") as response:
                assert response.status == 200
                ready = [entry["ready"] for entry in (await response.json())["models"]["fake"]]
                assert ready == [False, True]


async def test_no_backend_at_all_is_a_503() -> None:
    async with serving(("fake", [relay_to(dead_url()), relay_to(dead_url())])) as served:
        async with served.session.post("/v1/completions", json=BODY) as response:
            assert response.status == 503 and response.headers["Retry-After"]
            assert (await response.json())["error"]["code"] == "backend_unavailable"
        async with served.session.get("/ready") as response:
            assert response.status == 503


@pytest.mark.parametrize("fault", ["!die", "!truncate"])
async def test_a_stream_cut_short_ends_in_an_error_event(fault: str) -> None:
    async with running(FakeOpenAI()) as vllm, serving(("fake", [relay_to(vllm.url)])) as served:
        events = await served.events("/v1/completions", BODY | {"prompt": f"{fault} abc"})
        *chunks, last = map(json.loads, events)  # each of them is whole
        assert chunks and last["error"]["code"] == "backend_error"
        assert ("vllm" if fault == "!die" else "[DONE]") in last["error"]["message"]
        assert await served.metric("octet_broken_streams_total", model="fake") == 1
        async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
            with pytest.raises(APIError):
                stream = await client.completions.create(
                    model="fake", prompt=f"{fault} abc", stream=True, max_tokens=12
                )
                _ = [chunk async for chunk in stream]


async def disconnect(served: Served, body: dict[str, Any], events: int) -> None:
    """Reads so many events of a stream, then closes the connection."""
    async with served.session.post("/v1/completions", json=body | {"stream": True}) as response:
        for _ in range(events):
            await response.content.readuntil(b"\n\n")
        response.close()


@pytest.mark.parametrize("events", [0, 2])
async def test_a_client_that_goes_away_stops_vllm(events: int) -> None:
    async with (
        running(FakeOpenAI(delay_s=0.02)) as vllm,
        serving(("fake", [relay_to(vllm.url)])) as served,
    ):
        body = BODY | {"max_tokens": 400, "prompt": "!wait" if events == 0 else "abc"}
        task = asyncio.create_task(disconnect(served, body, events))
        while not vllm.running:
            await asyncio.sleep(0.01)
        if events == 0:  # no byte has come, so the client's own request is what ends
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        async with asyncio.timeout(2):
            while vllm.running or vllm.engine.stats.running:
                await asyncio.sleep(0.01)
        await served.idle()
        assert vllm.cancelled == 1
        endpoint = "/v1/completions"
        assert await served.metric("octet_client_disconnects_total", endpoint=endpoint) == 1
        labels = {"endpoint": endpoint, "model": "fake", "status": "499"}
        assert await served.metric("octet_requests_total", **labels) == 1


async def test_connections_are_kept_and_reused() -> None:
    async with running(FakeOpenAI()) as vllm, serving(("fake", [relay_to(vllm.url)])) as served:
        for stream in (False, True, False, True):
            await answer(served.url, BODY | {"stream": stream})
        backend: Any = served.gateway.pools["fake"].backends[0]
        (kept,) = backend._session.connector._conns.values()
        assert len(kept) == 1


async def test_usage_is_counted_where_the_stream_has_it() -> None:
    async with running(FakeOpenAI()) as vllm, serving(("fake", [relay_to(vllm.url)])) as served:
        await served.events("/v1/completions", BODY | {"stream_options": {"include_usage": True}})
        assert await served.metric("octet_tokens_total", model="fake", type="output") == 12
        await served.events("/v1/completions", BODY)
        assert await served.metric("octet_tokens_total", model="fake", type="output") == 12
        assert await served.metric("octet_uncounted_streams_total", model="fake") == 1


async def test_a_field_goes_to_the_backend_of_a_pool_that_takes_it() -> None:
    async with running(FakeOpenAI()) as vllm:
        pool = [fake_backend(), relay_to(vllm.url)]
        async with serving(("fake", pool)) as served:
            for _ in range(3):
                status, _ = await served.post("/v1/completions", BODY | {"min_p": 0.1})
                assert status == 200
            assert len(vllm.requests) == 3


async def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="VLLM_KEY is not set"):
        relay_to("http://127.0.0.1:1", api_key_env="VLLM_KEY")
    monkeypatch.setenv("VLLM_KEY", "secret")
    async with running(FakeOpenAI()) as vllm:
        backend = relay_to(vllm.url, api_key_env="VLLM_KEY")
        async with serving(("fake", [backend])) as served:
            await answer(served.url, BODY)
        assert vllm.headers[0]["authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ("x" * 600, RequestError),
        ("!busy", BackendUnavailable),
        ("!html", BackendUnavailable),
        ("!hangup", BackendUnavailable),
        ("!die", BackendError),
    ],
)
async def test_generate_raises_what_went_wrong(prompt: str, error: type[Exception]) -> None:
    async with running(FakeOpenAI()) as vllm:
        backend = relay_to(vllm.url)
        await backend.start()
        request = GenerateRequest(
            request_id="r", model="fake", prompt=prompt, max_tokens=9, ignore_eos=True
        )
        with pytest.raises(error):
            _ = [event async for event in backend.generate(request)]
        await backend.close()
