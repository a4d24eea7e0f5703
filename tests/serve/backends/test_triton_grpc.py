"""Triton as a backend: its errors told apart, its model asked only for what it has."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from octet.errors import (
    BackendError,
    BackendUnavailable,
    FailureKind,
    OctetError,
    RequestError,
    UnsupportedField,
)
from serve.backends import base, triton_grpc
from serve.backends.triton_errors import error_of
from serve.backends.triton_grpc import TritonBackend
from serve.engine.request import Finished
from tests.fake_servers import FakeTriton, running
from tests.fakes import byte_tokenizer, fake_backend, opened
from tests.ports import reserved_port
from tests.serve.conftest import serving
from tests.serve.openai_clients import asked, events_of, triton_to
from tests.serve.waiting import until

BODY = {"model": "fake", "prompt": "abc", "temperature": 0, "max_tokens": 12, "ignore_eos": True}
CHAT = {
    "model": "fake",
    "messages": [{"role": "user", "content": "hi"}],
    "temperature": 0,
    "max_tokens": 8,
}


@asynccontextmanager
async def started(server: FakeTriton, **settings: Any) -> AsyncIterator[TritonBackend]:
    async with opened(triton_to(server.url, **settings)) as backend:
        yield backend


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """The byte tokenizer's files, without a chat template."""
    byte_tokenizer().inner.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


async def test_answers_are_those_of_the_embedded_engine(tokenizer: Path) -> None:
    async with (
        running(FakeTriton()) as triton,
        serving(("fake", [triton_to(triton.url, tokenizer=tokenizer)])) as served,
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
        started(triton, tokenizer=tokenizer) as backend,
    ):
        by_text = await events_of(backend, asked())
        assert by_text == await events_of(backend, asked((97, 98, 99)))
        assert all("text_input" in request["inputs"] for request in triton.requests)
        with pytest.raises(UnsupportedField) as refused:
            await events_of(backend, asked(logprobs=1))
        assert refused.value.param == "logprobs"
        with pytest.raises(RequestError, match="no text has exactly these"):
            await events_of(backend, asked((0xC3,)))


async def test_a_model_that_was_replaced_by_another_is_asked_as_that_one_wants() -> None:
    """Loaded again under the same name and connection, with other inputs."""
    async with running(FakeTriton()) as triton, started(triton) as backend:
        before = await events_of(backend, asked())
        for flag in FakeTriton.FLAGS[:2]:
            del triton.inputs[flag]
        with pytest.raises(BackendUnavailable, match="unexpected inference input"):
            await events_of(backend, asked())
        assert await events_of(backend, asked()) == before


async def test_without_a_tokenizer_chat_and_token_ids_are_refused() -> None:
    async with running(FakeTriton(token_ids=False)) as triton, started(triton) as backend:
        with pytest.raises(RequestError, match="chat template"):
            backend.chat_prompt(CHAT["messages"])
        with pytest.raises(RequestError, match="give the backend a tokenizer"):
            await events_of(backend, asked((97,)))


async def test_what_no_model_of_triton_does_is_refused_by_name() -> None:
    async with (
        running(FakeTriton()) as triton,
        serving(("fake", [triton_to(triton.url)])) as served,
    ):
        for fields in ({"echo": True}, {"min_p": 0.2}, {"made_up": 1}):
            status, error = await served.post("/v1/completions", BODY | fields)
            assert status == 400 and error["error"]["param"] == next(iter(fields))


@pytest.mark.parametrize("token_ids", [True, False])
async def test_sampling_and_metadata_arrive(token_ids: bool, tokenizer: Path) -> None:
    fields = {"top_p": 0.5, "top_k": 4, "seed": 9}
    async with (
        running(FakeTriton(token_ids=token_ids)) as triton,
        started(triton, tokenizer=tokenizer) as backend,
    ):
        headers = {"x-request-id": "mine", "traceparent": "00-1-2-01"}
        sent = {"content-type": "application/json"} | headers  # of HTTP: gRPC has its own
        await events_of(backend, asked(stop=("\n",), headers=sent, **fields))
        await events_of(backend, asked(max_tokens=None, ignore_eos=False))
    first, second = triton.requests
    assert first.items() >= (fields | {"stop": ["\n"], "max_tokens": 9}).items()
    # Our entry takes null for no limit. vLLM's backend would make 16 of it.
    assert second["max_tokens"] is None if token_ids else second["max_tokens"] > 100_000
    assert triton.metadata[0].items() >= headers.items()
    assert "application/json" not in triton.metadata[0].values()


@pytest.mark.parametrize(
    ("prompt", "error", "kind"),
    [
        ("!stub", BackendUnavailable, "dead"),
        ("!internal", BackendUnavailable, "failed"),
        ("!full", BackendUnavailable, "overloaded"),
        ("!die", BackendError, "failed"),
        ("!endless", BackendError, "garbled"),
        ("!nonsense", BackendError, "garbled"),
    ],
)
async def test_each_failure_has_its_kind(prompt: str, error: type[Exception], kind: str) -> None:
    async with running(FakeTriton()) as triton, started(triton) as backend:
        with pytest.raises(BackendError) as failed:
            await events_of(backend, asked(prompt))
        assert type(failed.value) is error and failed.value.kind == kind
        assert isinstance((await events_of(backend, asked()))[-1], Finished)


SHAPELESS = {
    **{told: told for told in ("[[1]]", '["x"]', '[{"5": -0.5}]', '[{"5": {}}]', "[{}]", "{")},
    "deep": "[" * 100_000,
    "bytes": '[{"5": {"logprob": -0.5, "bytes": 1000000000000000000}}]',  # that many
}


@pytest.mark.parametrize("told", SHAPELESS.values(), ids=SHAPELESS)
async def test_log_probabilities_of_another_shape_are_garbled(
    told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_grpc, "read_outputs", lambda _: {"logprobs": [told]})
    async with running(FakeTriton(token_ids=True)) as triton, started(triton) as backend:
        with pytest.raises(BackendError, match="a response cannot be read") as failed:
            await events_of(backend, asked(logprobs=2))
    assert failed.value.kind == "garbled"


async def test_an_unknown_model_is_refused() -> None:
    async with running(FakeTriton()) as triton, started(triton, model="nope") as backend:
        for call in (backend.probe(), events_of(backend, asked())):
            with pytest.raises(BackendUnavailable, match="unknown model") as failed:
                await call
            assert failed.value.kind == "refused"
        assert not await backend.ready()


async def test_a_model_with_another_interface_is_named() -> None:
    triton = FakeTriton()
    triton.inputs = {"image": "FP32"}
    async with running(triton), started(triton) as backend:
        with pytest.raises(BackendUnavailable, match="takes image: neither"):
            await events_of(backend, asked())


async def test_calls_to_a_host_that_vanished_end_when_it_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fake is there all the time: only the held connection says that its host is gone."""
    seen = asyncio.Event()

    async def held(*_: Any, **__: Any) -> None:
        await seen.wait()

    monkeypatch.setattr(triton_grpc, "hold_open", held)
    async with running(FakeTriton()) as triton, started(triton) as backend:
        waiting = asyncio.create_task(events_of(backend, asked("!wait")))
        holding = asyncio.create_task(backend.hold())
        await until(lambda: triton.requests)
        seen.set()
        await holding
        with pytest.raises(BackendUnavailable, match="host is gone") as failed:
            await waiting
        assert failed.value.kind == "lost"


async def begin(backend: TritonBackend, prompt: str, until: asyncio.Event) -> list[Any]:
    """The events of an answer; `until` is set at the first."""
    events = []
    async for event in backend.generate(asked(prompt, max_tokens=60)):
        events.append(event)
        until.set()
    return events


@pytest.mark.parametrize("found_by", ["another request", "the probe"])
async def test_requests_on_a_dead_model_end_when_one_is_told(
    found_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton never answers those that were under way; before an event they can go elsewhere."""
    monkeypatch.setattr(base, "PROBE", "!stub")
    begun = asyncio.Event()
    async with running(FakeTriton(delay_s=0.05)) as triton, started(triton) as backend:
        waiting = asyncio.create_task(failure_of(backend, "!wait", asyncio.Event()))
        answering = asyncio.create_task(failure_of(backend, "abc", begun))
        await begun.wait()
        await until(lambda: len(triton.requests) >= 2)
        with pytest.raises(BackendUnavailable, match="Stub process"):
            await (backend.probe() if found_by == "the probe" else begin(backend, "!stub", begun))
        async with asyncio.timeout(60):
            before, after = await waiting, await answering
        assert type(before) is BackendUnavailable and type(after) is BackendError
        assert before.kind == after.kind == "dead" and "its model died" in str(before)


@pytest.mark.parametrize(("instances", "prompt"), [(1, "x" * 600), (2, "!stub"), (1, "!internal")])
async def test_a_request_goes_on_where_its_model_may_live(instances: int, prompt: str) -> None:
    """After a refusal that quotes anything; and where only one of several processes died."""
    triton, begun = FakeTriton(delay_s=0.01), asyncio.Event()
    triton.instances = instances
    async with running(triton), started(triton) as backend:
        answering = asyncio.create_task(begin(backend, "abc", begun))
        await begun.wait()
        with pytest.raises(OctetError):
            await events_of(backend, asked(prompt))
        assert isinstance((await answering)[-1], Finished)


async def failure_of(backend: TritonBackend, prompt: str, until: asyncio.Event) -> BackendError:
    with pytest.raises(BackendError) as failed:
        await begin(backend, prompt, until)
    return failed.value


async def test_a_server_that_comes_back_is_asked_again_within_two_seconds() -> None:
    async with AsyncExitStack() as stack:
        port = stack.enter_context(reserved_port())
        triton = FakeTriton()
        await triton.start(port)
        await triton.stop()
        backend = await stack.enter_async_context(started(triton))
        for _ in range(5):  # gRPC waits longer after each failure
            assert not await backend.ready()
            await asyncio.sleep(0.1)
        triton = FakeTriton()
        await triton.start(port)
        try:
            async with asyncio.timeout(2):
                while not await backend.ready():
                    await asyncio.sleep(0.02)
            assert await events_of(backend, asked())
        finally:
            await triton.stop()


async def test_the_load_is_read_where_the_metrics_are() -> None:
    pages = {
        'nv_inference_pending_request_count{model="fake",version="1"} 4\n'
        'nv_inference_pending_request_count{model="other",version="1"} 9\n': (0, 4, None, None),
        "vllm:num_requests_running 2\nvllm:num_requests_waiting 1\n": (2, 1, None, None),
        'nv_trt_llm_request_metrics{model="t",request_type="scheduled",version="1"} 3\n'
        'nv_trt_llm_request_metrics{model="t",request_type="waiting",version="1"} 5\n'
        'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="t"} 0.5\n'
        'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="t"} 100\n'
        'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="t"} 64\n': (
            *(3, 5, 0.5, 6400),
        ),
    }
    async with running(FakeTriton()) as triton:
        async with started(triton, metrics_url=triton.metrics_url) as backend:
            assert await backend.load() is None  # an empty page
            for page, (running_now, waiting, usage, capacity) in pages.items():
                triton.metrics = page
                report = await backend.load()
                assert report is not None
                assert (report.running, report.waiting) == (running_now, waiting)
                assert (report.kv_usage, report.capacity_tokens) == (usage, capacity)
        async with started(triton) as backend:
            assert await backend.load() is None
    async with started(triton, metrics_url=triton.metrics_url) as backend:
        assert await backend.load() is None  # nobody is there


LENGTH = (
    "Error generating stream: The decoder prompt (length 600) is longer than the maximum model "
    "length of 512. Make sure that `max_model_len` is no smaller than the number of text tokens."
)


@pytest.mark.parametrize(
    ("details", "param"),
    [
        (LENGTH, "prompt"),
        (
            "Error generating stream: The decoder prompt (length 512) plus the number of requested "
            "output tokens (at least 1) is longer than the maximum model length of 512.",
            "prompt",
        ),
        (
            "Error generating stream: This model's maximum context length is 512 tokens. However, "
            "your prompt contains at least 513 input tokens",
            "prompt",
        ),
        ("Error generating stream: The decoder prompt cannot be empty", "prompt"),
        ("Error generating stream: Token id 99999 is out of vocabulary", "prompt"),
        (
            "Error generating stream: Requested sample logprobs of 50, which is greater than max "
            "allowed: 20",
            "logprobs",
        ),
        (
            "Error generating stream: 'NoneType' object has no attribute 'lora_name'",
            "sampling_parameters",
        ),
        (
            "Executor failed process requestId 1 due to the following error: Encountered an error "
            "when fetching new request: Prompt length (600) exceeds maximum input length (512).",
            "prompt",
        ),
        (json.dumps({"message": "m", "param": "top_p", "code": "c"}), "top_p"),
        (f"{LENGTH} (Stub process x is not healthy)", "prompt"),
        (json.dumps({"message": "'X is not healthy'", "param": "stop", "code": "c"}), "stop"),
    ],
    ids=lambda value: re.sub(r"\W+", "-", value[:60]),
)
def test_plain_refusals_that_are_the_clients_are_400s(details: str, param: str) -> None:
    error = error_of("triton", None, details)
    assert isinstance(error, RequestError) and (error.status, error.param) == (400, param)
    if param == "prompt" and "length" in details:
        assert error.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("code", "details", "kind"),
    [
        (None, "Stub process 'm_0_0' is not healthy.", "dead"),
        (None, "Model is unavailable due to unhealthy vLLM engine", "dead"),
        (None, "Error generating stream: EngineCore encountered an issue.", "dead"),
        (None, "the embedded engine is not running", "dead"),
        (None, "the embedded engine failed; see the server's log", "dead"),
        (None, "the GPU failed (an illegal memory access); restart this process", "dead"),
        (None, "the embedded engine failed at this request: ValueError('x')", "failed"),
        (None, "the embedded engine was stopped", "lost"),
        (None, "Request for unknown model: 'm' is not found", "refused"),
        (None, "Exceeds maximum queue size", "overloaded"),
        (None, "1024 requests are waiting for the embedded engine; try again later", "overloaded"),
        (None, "Request timeout expired", "timeout"),
        (None, "CUDA error: an illegal memory access was encountered", "failed"),
        (None, "[" * 100_000, "failed"),
        ("UNAVAILABLE", "failed to connect to all addresses; last error: refused", "refused"),
        ("UNAVAILABLE", "recvmsg:Connection reset by peer", "lost"),
        ("UNAVAILABLE", "Socket closed", "lost"),
        ("CANCELLED", "CANCELLED", "lost"),
        ("RESOURCE_EXHAUSTED", "too many", "overloaded"),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", "timeout"),
        ("NOT_FOUND", "no such model", "refused"),
        ("INTERNAL", "something", "failed"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_kinds_of_what_triton_writes(code: str | None, details: str, kind: FailureKind) -> None:
    error = error_of("triton", grpc.StatusCode[code] if code else None, details)
    assert isinstance(error, BackendError) and error.kind == kind
