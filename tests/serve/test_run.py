"""The server's life: readiness, draining, forcing, and what keeps it from starting."""

import asyncio
import json
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from octet.errors import ArtifactError, ConfigError
from serve.config import GatewayConfig
from serve.run import _allow_files, bind, run
from serve.settings import settings_of
from tests.fake_servers import FakeOpenAI, running
from tests.fakes import FakeRunner, fake_backend
from tests.serve.conftest import serving
from tests.serve.openai_clients import relay_to
from tests.serve.process import octet_serve
from tests.serve.waiting import until

BODY = {"model": "fake", "prompt": "abc", "max_tokens": 60, "ignore_eos": True}
SLOW = FakeRunner(delay_s=0.01)  # 60 tokens take 0.6 s


async def test_the_first_signal_drains() -> None:
    async with serving(("fake", [fake_backend(SLOW)]), drain_timeout_s=60) as served:
        running_answer = asyncio.create_task(served.events("/v1/completions", BODY))
        await until(lambda: served.gateway.running)
        served.server.handle_exit(signal.SIGTERM, None)
        async with served.session.get("/ready") as response:
            assert response.status == 503 and (await response.json())["draining"]
        async with served.session.get("/health") as response:
            assert response.status == 200
        async with served.session.post("/v1/completions", json=BODY) as response:
            assert response.status == 503
            assert (await response.json())["error"]["code"] == "draining"
            # A client that keeps its connection would find a closed one at its next request.
            assert response.headers["connection"] == "close"
            assert 1 <= int(response.headers["retry-after"]) <= 60
        events = await running_answer
        assert events[-1] == "[DONE]"
    assert not served.server.cut_short


async def test_a_drain_waits_for_a_body_that_is_still_arriving() -> None:
    body = json.dumps(BODY).encode()

    async def in_two_parts() -> AsyncIterator[bytes]:
        yield body[:10]
        await until(lambda: served.gateway.running)
        served.server.handle_exit(signal.SIGTERM, None)
        await asyncio.sleep(0.5)
        yield body[10:]

    async with serving(("fake", [fake_backend(SLOW)]), drain_timeout_s=60) as served:
        headers = {"content-type": "application/json"}
        request = served.session.post("/v1/completions", data=in_two_parts(), headers=headers)
        async with request as response:
            answer = await response.json()
        assert response.status == 200, answer
        assert answer["usage"]["completion_tokens"] == 60
    assert not served.server.cut_short and served.gateway.running == 0


async def test_a_long_prompt_does_not_hold_up_others() -> None:
    # Short enough for the context to be tokenized, and one token a character: too long.
    async with serving(("fake", [fake_backend(FakeRunner(context=200_000))])) as served:
        chat = {"model": "fake", "messages": [{"role": "user", "content": "ab " * 300_000}]}
        asking = asyncio.create_task(served.post("/v1/chat/completions", chat))
        answered = 0
        while not asking.done():
            async with served.session.get("/health") as response:
                assert response.status == 200
            answered += 1
        assert answered > 5
        status, error = await asking
        assert (status, error["error"]["code"]) == (400, "context_length_exceeded")
        assert served.gateway.running == 0


@pytest.mark.parametrize("kind", ["embedded", "vllm"])
@pytest.mark.parametrize("how", ["deadline", "second signal"])
async def test_what_outlasts_the_drain_ends_in_an_error_event(how: str, kind: str) -> None:
    timeout_s = 0.2 if how == "deadline" else 60
    async with running(FakeOpenAI(delay_s=0.01)) as vllm, AsyncExitStack() as stack:
        backend: Any = fake_backend(SLOW)
        if kind == "vllm":
            backend = relay_to(vllm.url)
        pools = ("fake", [backend])
        served = await stack.enter_async_context(serving(pools, drain_timeout_s=timeout_s))
        body = BODY | {"max_tokens": 400}
        answer = asyncio.create_task(served.events("/v1/completions", body))
        whole = asyncio.create_task(served.post("/v1/completions", body))
        await until(lambda: served.gateway.running >= 2)
        await asyncio.sleep(0.1)
        served.server.handle_exit(signal.SIGINT, None)
        if how == "second signal":
            served.server.handle_exit(signal.SIGTERM, None)
        now = asyncio.get_running_loop().time
        started = now()
        events = await answer
        assert len(events) > 1
        status, error = await whole
        assert status == 503 and error == json.loads(events[-1])
        assert error["error"]["code"] == "draining"
        assert now() - started < 3
        # That is nobody's failure: neither tried again nor held against the backend.
        (member,) = served.gateway.pools["fake"].members
        assert (member.standing, member.last_error) == ("in", "")
        assert not served.gateway.metrics.registry.get_sample_value(
            "octet_retries_exhausted_total", {"pool": "fake"}
        )
        await stack.aclose()
        assert served.server.cut_short


async def test_a_second_signal_waits_for_no_reader() -> None:
    """No request runs any more, but a client has not taken all that was written for it."""
    async with serving(("fake", [fake_backend(SLOW)]), drain_timeout_s=60) as served:
        port = int(served.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * 200)
            connections = served.server.server_state.connections
            await until(lambda: any(c.transport.get_write_buffer_size() for c in connections))
            served.server.handle_exit(signal.SIGTERM, None)
            await asyncio.sleep(0.3)
            assert connections
            served.server.handle_exit(signal.SIGTERM, None)
            await until(lambda: not connections)
    assert served.server.cut_short


def test_nothing_is_done_inside_of_a_signal_handler(capfd: pytest.CaptureFixture[str]) -> None:
    """Which may come amid a line that is being printed: that would be a RuntimeError."""

    async def signalled() -> None:
        async with serving(("fake", [fake_backend(SLOW)])) as served:
            served.server.handle_exit(signal.SIGTERM, None)
            assert not served.gateway.draining and "draining" not in capfd.readouterr().err
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert served.gateway.draining

    asyncio.run(signalled())
    assert "SIGTERM: draining 0 requests" in capfd.readouterr().err


def test_an_address_in_use_is_one_line(tmp_path: Path) -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"on 127.0.0.1:{port}: Address .*--port$"):
            bind("127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"cannot listen on no\.such\.host"):
        bind("no.such.host.invalid", 0)


def test_a_backend_that_can_never_work_ends_the_start(tmp_path: Path) -> None:
    config = tmp_path / "octet.yaml"
    config.write_text(
        "models: {m: {pool: [{type: vllm, url: 'http://127.0.0.1:9'}]},"
        " n: {pool: [{type: embedded, path: none}]}}"
    )
    with pytest.raises(ArtifactError, match="none: no such directory"):
        run(settings_of(None, config), config=config, port=0)


def test_a_target_that_is_no_export_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no such directory"):
        settings_of(tmp_path / "none", None)
    with pytest.raises(ArtifactError, match="not an Octet artifact"):
        settings_of(tmp_path, None)
    with pytest.raises(ConfigError, match="nothing to serve"):
        settings_of(None, None)


def test_with_logs_as_json_every_line_is_json(tmp_path: Path) -> None:
    config = tmp_path / "octet.yaml"
    backends = "[{type: vllm, url: 'http://127.0.0.1:9'}]"
    config.write_text(
        f"models: {{m: {{pool: {backends}}}}}\npools: {{spare: {{backends: {backends}}}}}\n"
        "logs: {format: json}\nadmin: {port: 0}"
    )
    with octet_serve(config) as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        said = [json.loads(next(lines))]
        while "administration on http" not in said[-1]["message"]:
            said.append(json.loads(next(lines)))
        process.send_signal(signal.SIGTERM)
        said += map(json.loads, lines)
        assert process.wait(60) == 0
    levels = {line["message"].partition(" ")[0]: line["level"] for line in said}
    assert levels.items() >= {"warning:": "warning", "serving": "info", "SIGTERM:": "info"}.items()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_octet_serve_ends_with_0_after_a_drain(tmp_path: Path, number: signal.Signals) -> None:
    config = tmp_path / "octet.yaml"
    config.write_text("models: {m: {pool: [{type: vllm, url: 'http://127.0.0.1:9'}]}}")
    with octet_serve(config) as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        said = [next(lines)]
        while not said[-1].startswith("serving m on http://127.0.0.1:"):
            said.append(next(lines))
        # It starts all the same: the backend may come later.
        assert any("cannot be reached" in line for line in said)
        assert "warning: pool m: none of its 1 backends serves yet\n" in said
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors


def test_too_few_open_files_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = GatewayConfig.model_validate({"models": {"m": {"pool": "p"}}, "pools": {"p": {}}})
    monkeypatch.setattr("serve.run.most_files", lambda: 1024)
    assert "may need 8192 open files, but the process may open 1024" in _allow_files(settings)
    monkeypatch.setattr("serve.run.most_files", lambda: 8192)
    assert _allow_files(settings) == ""
