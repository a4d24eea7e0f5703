"""Tests Responses and Messages of a real vLLM through the gateway, with the official clients."""

import asyncio
import hashlib
import json
import os
import signal
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from tests.fake_servers import FakeOpenAI, running
from tests.integration.servers.launch import GatewayServer, VllmServer, free_port
from tests.serve.named_contract import (
    CHECKS,
    Check,
    anthropic,
    messages_client,
    responses_client,
)

EXAMPLE = Path(__file__).parents[2] / "examples" / "python-lm"
SERVED: dict[str, Any] = {"served_name": "python-lm-bf16", "kv_cache_dtype": "auto"}
PROMPT = "def f(x):\n"
SECRET = "sk-routes"
TEMPLATE = """\
{%- for m in messages %}
{%- if m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text }}{% endif %}
{%- endfor %}"""
LONG: dict[str, Any] = {"max_output_tokens": 800, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "template.jinja"
    path.write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def server(start_vllm: Callable[..., VllmServer], template: Path) -> VllmServer:
    """The example as vLLM serves chats of it: its tokenizer has no template of its own."""
    return start_vllm(EXAMPLE / "model", chat_template=template, **SERVED)


def written(
    directory: Path, server: VllmServer, others: Sequence[str] = (), **pool: Any
) -> tuple[Path, int]:
    """The configuration of a gateway before `server` and `others`, by URL; and its port."""
    port, digest = free_port(), hashlib.sha256(SECRET.encode()).hexdigest()
    backends = [{"type": "vllm", "name": "a", "url": server.url, "model": server.served_name}]
    backends += [{"type": "vllm", "url": url} for url in others]
    config = {
        "listen": {"port": port},
        "models": {"python-lm": {"pool": "bf16"}},
        "pools": {"bf16": {"backends": backends, **pool}},
        "access": {"keys": [{"name": "team", "sha256": digest, "tokens_per_day": 100_000}]},
        "logs": {"format": "json", "access": True},
    }
    path = directory / "octet.yaml"
    path.write_text(yaml.safe_dump(config))
    return path, port


@pytest.fixture(scope="module")
def gateway(
    server: VllmServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayServer]:
    directory = tmp_path_factory.mktemp("gateway")
    path, port = written(directory, server)
    with GatewayServer(config=path, port=port, log=directory / "gateway.log") as running:
        yield running


def page(url: str) -> str:
    with urllib.request.urlopen(url) as answer:
        found: str = answer.read().decode()
    return found


def sample(text: str, name: str, *labels: str) -> float:
    """The sum of the samples whose line has all `labels`."""
    lines = [line for line in text.splitlines() if line.startswith(name)]
    return sum(float(line.split()[-1]) for line in lines if all(label in line for label in labels))


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key that the checks of the contract send; vLLM asks for none."""
    for function in (responses_client, messages_client):
        monkeypatch.setattr(function, "__defaults__", (SECRET,))


@pytest.mark.vllm
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("behind", [False, True], ids=["vllm", "gateway"])
async def test_contract(
    behind: bool, check: Check, server: VllmServer, gateway: GatewayServer
) -> None:
    if behind:
        await check(gateway.url, "python-lm", PROMPT)
    else:
        await check(server.url, server.served_name, PROMPT)


@pytest.mark.vllm
async def test_the_tokens_of_both_are_counted_as_vllm_counts_them(
    server: VllmServer, gateway: GatewayServer
) -> None:
    before = page(f"{gateway.url}/metrics"), page(f"{server.url}/metrics")
    said = [{"role": "user", "content": PROMPT}]
    async with responses_client(gateway.url) as client, messages_client(gateway.url) as other:
        for stream in (False, True):
            found = await client.responses.create(
                model="python-lm", input=PROMPT, max_output_tokens=9, stream=stream
            )
            if stream:
                _ = [event async for event in found]
            message = await other.messages.create(
                model="python-lm", messages=said, max_tokens=9, stream=stream
            )
            if stream:
                _ = [event async for event in message]
    after = page(f"{gateway.url}/metrics"), page(f"{server.url}/metrics")
    for ours, theirs in (("input", "prompt"), ("output", "generation")):
        counted = [
            sample(text, "octet_tokens_total", f'type="{ours}"', 'counted="backend"')
            for text in (before[0], after[0])
        ]
        real = [sample(text, f"vllm:{theirs}_tokens_total") for text in (before[1], after[1])]
        print(f"\n{ours}: {counted[1] - counted[0]:g} here, {real[1] - real[0]:g} in vLLM")
        assert counted[1] - counted[0] == real[1] - real[0] > 0
    lines = [json.loads(line) for line in gateway.log.read_text().splitlines() if line[:1] == "{"]
    logged = [line for line in lines if line.get("path") in ("/v1/responses", "/v1/messages")]
    assert logged[-1]["key"] == "team" and logged[-1]["backend"] == "a"
    assert logged[-1]["prompt_tokens"] > 0 and logged[-1]["completion_tokens"] > 0


@pytest.mark.vllm
async def test_answers_say_who_gave_them_and_errors_are_the_protocols(
    gateway: GatewayServer,
) -> None:
    async with responses_client(gateway.url) as client:
        raw = await client.responses.with_raw_response.create(
            model="python-lm", input=PROMPT, max_output_tokens=2
        )
        assert raw.headers["x-octet-backend"] == "bf16/a" and raw.headers["x-request-id"]
        own = {"finish_reason": "abort"}  # which vLLM repeats, and means in chats
        repeated = await client.responses.create(
            model="python-lm", input=PROMPT, max_output_tokens=2, metadata=own
        )
        assert repeated.metadata == own
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model="other", input=PROMPT)
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await client.responses.create(
                model="python-lm", input=PROMPT, previous_response_id="resp_1"
            )
        with pytest.raises(openai.NotFoundError, match="no response is stored here"):
            await client.responses.retrieve("resp_1")
    said = [{"role": "user", "content": PROMPT}]
    async with messages_client(gateway.url) as client:
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(model="other", messages=said, max_tokens=2)
        with pytest.raises(anthropic.BadRequestError, match="5000") as refused:
            await client.messages.create(model="python-lm", messages=said, max_tokens=5_000)
        assert refused.value.body["error"]["type"] == "invalid_request_error"
        with pytest.raises(anthropic.BadRequestError):  # vLLM's own validation, in OpenAI's form
            await client.messages.create(
                model="python-lm", messages=said, max_tokens=2, extra_body={"thinking": {}}
            )
    async with messages_client(gateway.url, "sk-wrong") as client:
        with pytest.raises(anthropic.AuthenticationError):
            await client.messages.create(model="python-lm", messages=said, max_tokens=2)


@pytest.mark.vllm
async def test_only_a_proven_backend_answers(
    server: VllmServer, exports: Path, tmp_path: Path
) -> None:
    """The other backend is not the model, and answers all the same."""
    proof = {"golden": str(exports / "checkpoint"), "weights": "original", "kv_cache": "float16"}
    said = [{"role": "user", "content": PROMPT}]
    routing = {"policy": "round_robin"}
    async with running(FakeOpenAI()) as impostor:
        path, port = written(tmp_path, server, [impostor.url], proof=proof, routing=routing)
        started = GatewayServer(config=path, port=port, log=tmp_path / "gateway.log")
        gateway = await asyncio.to_thread(started.__enter__)
        try:
            entries = json.loads(await asyncio.to_thread(page, f"{gateway.url}/ready"))["models"]
            proofs = {entry["proof"] for entry in entries["python-lm"]}
            assert proofs == {"proven", "refused"}, entries
            async with (
                responses_client(gateway.url) as client,
                messages_client(gateway.url) as other,
            ):
                for _ in range(4):
                    answers: list[Any] = [
                        await client.responses.with_raw_response.create(
                            model="python-lm", input=PROMPT, max_output_tokens=2
                        ),
                        await other.messages.with_raw_response.create(
                            model="python-lm", messages=said, max_tokens=2
                        ),
                    ]
                    for answer in answers:
                        assert answer.headers["x-octet-backend"] == "bf16/a"
                        assert answer.headers["x-octet-artifact"]
        finally:
            await asyncio.to_thread(started.__exit__, None, None, None)


@pytest.mark.vllm
async def test_a_client_that_leaves_frees_vllm(server: VllmServer, gateway: GatewayServer) -> None:
    said = [{"role": "user", "content": PROMPT}]
    async with responses_client(gateway.url) as client, messages_client(gateway.url) as other:
        streams: list[Any] = [
            await client.responses.create(model="python-lm", input=PROMPT, stream=True, **LONG),
            await other.messages.create(
                model="python-lm", messages=said, max_tokens=800, stream=True
            ),
        ]
        for stream in streams:
            await anext(aiter(stream))
            await stream.close()
    async with asyncio.timeout(60):
        while sample(page(f"{server.url}/metrics"), "vllm:num_requests_running"):
            await asyncio.sleep(0.05)


@pytest.mark.vllm
async def test_a_vllm_that_is_killed_in_mid_stream_ends_both_in_an_error(
    start_vllm_for_test: Callable[..., VllmServer],
    template: Path,
    tmp_path: Path,
) -> None:
    server = start_vllm_for_test(EXAMPLE / "model", chat_template=template, **SERVED)
    path, port = written(tmp_path, server)
    said = [{"role": "user", "content": PROMPT}]
    with GatewayServer(config=path, port=port, log=tmp_path / "gateway.log") as gateway:
        async with responses_client(gateway.url) as client, messages_client(gateway.url) as other:
            response = await client.responses.create(
                model="python-lm", input=PROMPT, stream=True, **LONG
            )
            # Greedily: a drawn answer may end by itself before the server is killed.
            message = await other.messages.create(
                model="python-lm",
                messages=said,
                max_tokens=800,
                stream=True,
                extra_body={"temperature": 0},
            )
            first = await anext(aiter(response))
            assert first.type == "response.created"
            assert (await anext(aiter(message))).type == "message_start"
            assert server.process is not None
            os.killpg(server.process.pid, signal.SIGKILL)
            last = [event async for event in response][-1]
            assert last.type == "error" and "a: " in last.message and server.url not in str(last)
            with pytest.raises(anthropic.APIStatusError, match="api_error"):
                _ = [event async for event in message]
            with pytest.raises(openai.InternalServerError) as refused:
                await client.responses.create(model="python-lm", input=PROMPT)
            assert refused.value.status_code == 503
            with pytest.raises(anthropic.APIStatusError, match="overloaded_error"):
                await other.messages.create(model="python-lm", messages=said, max_tokens=2)
