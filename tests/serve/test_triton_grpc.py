"""Triton behind the gateway: its errors told apart, its model asked only for what it has."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from serve.backends.triton_grpc import TritonBackend
from serve.config import TritonConfig
from tests.fake_servers import FakeTriton, running
from tests.fakes import byte_tokenizer, fake_backend
from tests.serve.conftest import Served, serving

BODY = {"model": "fake", "prompt": "abc", "temperature": 0, "max_tokens": 12, "ignore_eos": True}
CHAT = {
    "model": "fake",
    "messages": [{"role": "user", "content": "hi"}],
    "temperature": 0,
    "max_tokens": 8,
}


def to(url: str, tokenizer: Path | None = None, model: str | None = None) -> TritonBackend:
    return TritonBackend(
        "fake", TritonConfig(type="triton", url=url, tokenizer=tokenizer, model=model)
    )


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """The byte tokenizer's files, without a chat template."""
    byte_tokenizer().inner.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


async def test_answers_are_those_of_the_embedded_engine(tokenizer: Path) -> None:
    async with (
        running(FakeTriton()) as triton,
        serving(("fake", [to(triton.url, tokenizer)])) as served,
        serving(("fake", [fake_backend()])) as alone,
    ):
        for path, body in (("/v1/completions", BODY), ("/v1/chat/completions", CHAT)):
            _, answer = await served.post(path, body)
            _, expected = await alone.post(path, body)
            for field in ("choices", "usage"):
                assert answer[field] == expected[field]
        _, answer = await served.post("/v1/completions", BODY | {"logprobs": 2})
        _, expected = await alone.post("/v1/completions", BODY | {"logprobs": 2})
        assert answer["choices"] == expected["choices"]
        events = await served.events("/v1/completions", BODY)
        assert events[-1] == "[DONE]" and len(events) > 5


async def test_the_model_is_asked_only_for_what_it_lists(tokenizer: Path) -> None:
    """The vLLM backend's own interface: text in, and here no log-probabilities."""
    async with (
        running(FakeTriton(token_ids=False, logprobs=False)) as triton,
        serving(("fake", [to(triton.url, tokenizer)])) as served,
    ):
        status, text = await served.post("/v1/completions", BODY)
        _, ids = await served.post("/v1/completions", BODY | {"prompt": [97, 98, 99]})
        assert status == 200 and text["choices"] == ids["choices"]
        assert all("text_input" in request["inputs"] for request in triton.requests)
        status, error = await served.post("/v1/completions", BODY | {"logprobs": 1})
        assert status == 400 and error["error"]["param"] == "logprobs"
        status, error = await served.post("/v1/completions", BODY | {"prompt": [0xC3]})
        assert status == 400 and "no text has exactly these" in error["error"]["message"]


async def test_without_a_tokenizer_chat_and_token_ids_are_refused() -> None:
    async with (
        running(FakeTriton(token_ids=False)) as triton,
        serving(("fake", [to(triton.url)])) as served,
    ):
        status, error = await served.post("/v1/chat/completions", CHAT)
        assert status == 400 and "chat template" in error["error"]["message"]
        status, error = await served.post("/v1/completions", BODY | {"prompt": [97]})
        assert status == 400 and "give the backend a tokenizer" in error["error"]["message"]


@pytest.mark.parametrize("fields", [{"echo": True}, {"min_p": 0.2}, {"made_up": 1}])
async def test_what_triton_cannot_do_is_refused(fields: dict[str, Any]) -> None:
    async with running(FakeTriton()) as triton, serving(("fake", [to(triton.url)])) as served:
        status, error = await served.post("/v1/completions", BODY | fields)
        assert status == 400 and error["error"]["param"] == next(iter(fields))


async def test_sampling_fields_arrive(tokenizer: Path) -> None:
    fields = {"top_p": 0.5, "top_k": 4, "seed": 9, "stop": ["\n"]}
    async with (
        running(FakeTriton()) as triton,
        serving(("fake", [to(triton.url, tokenizer)])) as served,
    ):
        await served.post("/v1/completions", BODY | fields)
        await served.post("/v1/chat/completions", CHAT | {"max_tokens": None})
    first, second = triton.requests
    assert first.items() >= (fields | {"temperature": 0, "max_tokens": 12}).items()
    assert second["max_tokens"] is None  # not vLLM's 16


@pytest.mark.parametrize(
    ("prompt", "status", "message"),
    [
        ("!stub", 503, "is not healthy"),
        ("!internal", 502, "the model raised"),
        ("x" * 600, 400, "512"),
    ],
)
async def test_errors_before_the_first_token(prompt: str, status: int, message: str) -> None:
    async with running(FakeTriton()) as triton, serving(("fake", [to(triton.url)])) as served:
        for stream in (False, True):
            got, error = await served.post(
                "/v1/completions", BODY | {"prompt": prompt, "stream": stream}
            )
            assert got == status and message in error["error"]["message"]


async def test_a_refusal_keeps_its_field_and_code() -> None:
    async with running(FakeTriton()) as triton, serving(("fake", [to(triton.url)])) as served:
        _, answer = await served.post("/v1/completions", BODY | {"prompt": "x" * 600})
        assert answer["error"]["param"] == "prompt"
        assert answer["error"]["code"] == "context_length_exceeded"


async def test_a_dead_model_process_gives_way_to_the_next_backend() -> None:
    async with running(FakeTriton()) as triton:
        pool = [to(triton.url), fake_backend()]
        async with serving(("fake", pool)) as served:
            status, _ = await served.post("/v1/completions", BODY | {"prompt": "!stub abc"})
            assert status == 200


async def test_a_failure_in_the_middle_is_an_error_event() -> None:
    async with running(FakeTriton()) as triton, serving(("fake", [to(triton.url)])) as served:
        *chunks, last = await served.events("/v1/completions", BODY | {"prompt": "!die"})
        assert chunks and "the model raised" in last


async def test_an_unknown_model_or_server_is_unavailable() -> None:
    async with (
        running(FakeTriton()) as triton,
        serving(("fake", [to(triton.url, model="nope")])) as served,
    ):
        status, error = await served.post("/v1/completions", BODY)
        assert status == 503 and "unknown model" in error["error"]["message"]
        async with served.session.get("/ready") as response:
            assert response.status == 503
    async with serving(("fake", [to("127.0.0.1:9")])) as served:
        status, error = await served.post("/v1/completions", BODY)
        assert status == 503 and "triton 127.0.0.1:9" in error["error"]["message"]


@pytest.mark.parametrize("prompt", ["abc", "!wait"])
async def test_a_client_that_goes_away_stops_the_model(prompt: str) -> None:
    async with (
        running(FakeTriton(delay_s=0.02)) as triton,
        serving(("fake", [to(triton.url)])) as served,
    ):
        task = asyncio.create_task(stream(served, prompt))
        while not triton.requests:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        async with asyncio.timeout(2):
            while triton.running or triton.engine.stats.running:
                await asyncio.sleep(0.01)
        await served.idle()


async def stream(served: Served, prompt: str) -> None:
    body = BODY | {"prompt": prompt, "max_tokens": 400}
    await served.events("/v1/completions", body)
