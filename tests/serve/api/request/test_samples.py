"""Requests that a gateway captures: as calibration reads them, and without a trace for clients."""

import asyncio
import fcntl
import hashlib
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from calibrate.samples.source import load_samples
from octet.errors import BackendUnavailable
from serve.api.request.samples import READERS
from serve.config import CaptureConfig, GatewayConfig
from serve.gateway.capture import MOST_ANSWER, MOST_TEXT
from serve.gateway.state import Epoch
from serve.gateway.status import status as status_of
from serve.routing import Routes
from tests.fake_servers import FakeOpenAI, running
from tests.serve.in_process import Client, in_process
from tests.serve.openai_clients import relay_to
from tests.serve.upstreams import DONE, Scripted, chunk, whole
from tests.serve.waiting import until

SAID = [
    {"role": "user", "content": [{"type": "text", "text": "abc"}, {"type": "text", "text": "d"}]}
]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "abcd", "max_tokens": 6},
    "/v1/chat/completions": {"messages": SAID, "max_tokens": 6},
    "/v1/responses": {"input": "abcd", "instructions": "Be brief.", "max_output_tokens": 6},
    "/v1/messages": {"messages": SAID, "system": "Be brief.", "max_tokens": 6},
}
SETTINGS = {"model": "m", "ignore_eos": True, "temperature": 0}


@asynccontextmanager
async def capturing(file: Path, backend: Any, **settings: Any) -> AsyncIterator[Client]:
    capture = {"file": file, "share": 1} | settings.pop("capture", {})
    models = {"m": {"pool": "main", "capture": capture}}
    async with in_process(("main", [backend]), models=models, **settings) as client:
        yield client


async def outcomes(client: Client, requests: int) -> dict[str, int]:
    """What became of `requests` captured ones, once all are written."""
    found: dict[str, int] = {}

    def complete() -> bool:
        entry = status_of(client.gateway)["models"]["m"]["capture"]
        found.clear()
        found.update(entry["dropped"] | {"kept": entry["kept"]})
        return sum(found.values()) >= requests

    await until(complete)
    return {name: count for name, count in found.items() if count}


def text_in(answer: dict[str, Any]) -> str:
    """The text of an answer in any of the four forms."""
    if "choices" in answer:
        choice = answer["choices"][0]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])
    if answer.get("object") == "response":
        return str(answer["output"][0]["content"][0]["text"])
    return str(answer["content"][0]["text"])


@pytest.mark.parametrize("path", BODIES)
async def test_a_calibration_reads_prompt_and_answer_of_each_route(
    path: str, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    body = BODIES[path] | SETTINGS
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(running(FakeOpenAI()))
        client = await stack.enter_async_context(capturing(file, relay_to(server.url)))
        answer = (await client.request(path, body)).json()
        streamed = await client.request(path, body | {"stream": True})
        assert (answer and streamed.status, len(text_in(answer)) > 3) == (200, True)
        assert await outcomes(client, 2) == {"kept": 2}
        assert client.metric("octet_captured_requests_total", model="m", outcome="kept") == 2
    one, other = load_samples(file).samples
    assert (one.text, one.messages) == (other.text, other.messages)
    if path == "/v1/completions":
        assert one.text == "abcd" + text_in(answer)
        return
    system = [{"role": "system", "content": "Be brief."}] if path[4:5] in "rm" else []
    said = {"role": "assistant", "content": text_in(answer)}
    assert list(one.messages) == [*system, {"role": "user", "content": "abcd"}, said]


async def test_text_is_redacted_and_nothing_else_of_a_request_is_stored(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    body = {"model": "m", "prompt": "From ada@example.org, case K-17:", "user": "user-7"}
    async with capturing(
        file, Scripted(whole(" call +1 555 0100 199")), capture={"redact": [r"K-\d+"]}
    ) as client:
        headers = {"x-request-id": "id-7", "user-agent": "agent-7"}
        assert (await client.request("/v1/completions", body, headers)).status == 200
        await outcomes(client, 1)
    assert json.loads(file.read_text("utf-8")) == {
        "text": "From [EMAIL], case [REDACTED]: call [NUMBER]",
        "share": 1.0,
    }


async def test_prompts_get_their_own_answers_and_calls_of_tools_stay(tmp_path: Path) -> None:
    texts = [{"index": i, "text": f"-{i}"} for i in range(4)]
    both = json.dumps({"choices": texts}).encode()
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    calls = json.dumps({"choices": [{"index": 0, "message": said}]}).encode()
    messages = [
        {"role": "user", "content": "q", "name": "ada"},
        said,
        {"role": "tool", "content": "1", "tool_call_id": "c1"},
    ]
    (one, two) = READERS["/v1/completions"]({"prompt": ["a", "b"], "n": 2}, both)
    assert (one, two) == ({"text": "a-0"}, {"text": "b-2"})
    (chat,) = READERS["/v1/chat/completions"]({"messages": messages}, calls)
    file = tmp_path / "calls.jsonl"
    file.write_text(json.dumps(chat))
    kept = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert list(load_samples(file).samples[0].messages) == [
        {"role": "user", "content": "q"}, kept, messages[2], kept
    ]  # fmt: skip


IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}]


@pytest.mark.parametrize(
    ("path", "body", "answer", "outcome"),
    [
        ("/v1/completions", {"prompt": [1, 2]}, whole(), "unsupported"),
        ("/v1/chat/completions", {"messages": IMAGE}, whole(), "unsupported"),
        ("/v1/completions", {"prompt": "a"}, b'{"choices": 7}', "unsupported"),
        ("/v1/completions", {"prompt": "a" * MOST_TEXT}, whole(), "too_long"),
        ("/v1/completions", {"prompt": "a"}, whole("a" * MOST_ANSWER), "too_long"),
        (
            "/v1/completions",
            {"prompt": "a", "stream": True},
            [chunk(), BackendUnavailable("cut", kind="lost")],
            "incomplete",
        ),
    ],
)
async def test_a_request_that_is_no_sample_is_answered_and_counted(
    path: str, body: Any, answer: Any, outcome: str, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    async with capturing(file, Scripted(answer)) as client:
        assert (await client.request(path, {"model": "m"} | body)).status == 200
        assert await outcomes(client, 1) == {outcome: 1}
        assert client.gateway.captures["m"]._held == 0
    assert not file.exists()


async def test_a_share_of_the_requests_is_captured(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    body = {"model": "m", "prompt": "abc", "stream": True}
    backend = Scripted([chunk("d"), chunk("e"), DONE])
    async with capturing(file, backend, capture={"share": 0.1}) as client:
        for _ in range(400):
            await client.request("/v1/completions", body)
    samples = load_samples(file).samples
    assert 10 < len(samples) < 90
    assert {sample.text for sample in samples} == {"abcde"}


async def test_a_private_key_and_a_refused_request_are_not_captured(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    digest = hashlib.sha256(b"sk-private").hexdigest()
    access = {"keys": [{"name": "k", "sha256": digest, "private": True}]}
    headers = {"authorization": "Bearer sk-private"}
    body = {"model": "m", "prompt": "abc"}
    async with capturing(file, Scripted(whole()), access=access) as client:
        assert (await client.request("/v1/completions", body, headers)).status == 200
    async with capturing(file, Scripted((400, b'{"error": {"message": "no"}}'))) as client:
        assert (await client.request("/v1/completions", body)).status == 400
    assert not file.exists()


async def test_a_full_disk_fails_no_request(tmp_path: Path) -> None:
    file = Path("/dev/full")  # each write fails: ENOSPC
    async with capturing(file, Scripted(whole("y"))) as client:
        for _ in range(5):
            status, answer = await client.post("/v1/completions", {"model": "m", "prompt": "x"})
            assert (status, text_in(answer)) == (200, "y")
        assert await outcomes(client, 5) == {"failed": 5}
        entry = status_of(client.gateway, addresses=True)["models"]["m"]["capture"]
        assert (entry["paused"], entry["file"]) == (True, "/dev/full")
        assert entry["last_failure"] == "No space left on device"
        public = status_of(client.gateway)["models"]["m"]["capture"]
        assert "file" not in public and "last_failure" not in public


async def test_a_slow_disk_delays_no_request_and_memory_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompts.jsonl"
    monkeypatch.setattr("serve.gateway.capture.MOST_HELD", 1000)
    async with capturing(file, Scripted(whole())) as client:
        with file.open("w") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            async with asyncio.timeout(60):
                for _ in range(20):
                    body = {"model": "m", "prompt": "abc"}
                    assert (await client.post("/v1/completions", body))[0] == 200
            waiting = client.gateway.captures["m"]._held
            assert 0 < waiting <= 1000
        found = await outcomes(client, 20)
        assert found["kept"] + found["busy"] == 20 and found["busy"]


async def test_requests_are_served_while_a_pattern_takes_exponential_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.gateway.capture.REDACT_S", 1.0)
    file = tmp_path / "prompts.jsonl"
    capture = {"redact": ["(a+)+$"]}
    async with capturing(file, Scripted(whole()), capture=capture) as client:
        body = {"model": "m", "prompt": "a" * 8000 + "!"}
        began = time.process_time()
        for _ in range(5):
            assert (await client.request("/v1/completions", body)).status == 200
        assert await outcomes(client, 0) == {}  # the first is still being redacted
        assert await outcomes(client, 5) == {"failed": 5}
        assert time.process_time() - began < 3.0  # those that waited took no second each
        entry = status_of(client.gateway, addresses=True)["models"]["m"]["capture"]
        assert entry["paused"] and "(a+)+$" in entry["last_failure"]
    assert not file.exists()


async def test_a_reload_turns_capture_on_and_off(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    body = {"model": "m", "prompt": "abc"}
    models = {"m": {"pool": "main"}}
    async with in_process(("main", [Scripted(whole())]), models=models) as client:
        gateway = client.gateway
        off, pools = gateway.config, gateway.pools

        def switch(config: GatewayConfig) -> None:
            gateway.replace(Epoch(config, Routes(config.models, pools), gateway.keys), pools)

        assert status_of(gateway)["models"]["m"]["capture"] is None
        for number in (1, 2):
            capture = CaptureConfig(file=file, share=1)
            model = off.models["m"].model_copy(update={"capture": capture})
            switch(off.model_copy(update={"models": {"m": model}}))
            await client.post("/v1/completions", body)
            assert await outcomes(client, number) == {"kept": number}  # the same one goes on
        switch(off)
        await client.post("/v1/completions", body)
        assert status_of(gateway)["models"]["m"]["capture"] is None
    assert len(load_samples(file).samples) == 2
