"""The backends' contract on real servers: two clients of vLLM, real Triton with our entry and with
models of TensorRT-LLM's and the vLLM backend's surfaces, the embedded engine on the real export.

The stand-in models answer from our engine (triton_backends/generating): what is real about them is
Triton, which checks names, types and shapes and carries requests, responses and cancellations.
"""

import asyncio
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from octet.errors import BackendError, BackendUnavailable
from serve.backends.base import Backend
from serve.backends.embedded import EmbeddedBackend
from serve.backends.openai_http import OpenAiHttpBackend
from serve.backends.triton_grpc import TritonBackend
from serve.config import EmbeddedConfig, HttpConfig
from serve.engine.tokenizer import Tokenizer
from tests.integration.model_stand_ins import STAND_INS, config_of
from tests.integration.servers.launch import TritonServer, VllmServer
from tests.integration.test_servers import is_stub, processes_of_group
from tests.serve.contract import FREED_S, Check, ask, collect, freed_within, owed
from tests.triton_config import triton_at

STAND_IN = Path(__file__).parent / "triton_backends" / "generating" / "model.py"
PROMPT = "def fibonacci(n):\n"
KINDS = ("embedded", "vllm", "openai", "triton", *(f"triton {name}" for name in STAND_INS))
NO_LOGPROBS = tuple(f"triton {name}" for name in STAND_INS)


@pytest.fixture(scope="module")
def stand_ins(
    exports: Path,
    start_triton: Callable[[Path], TritonServer],
    tmp_path_factory: pytest.TempPathFactory,
) -> TritonServer:
    """A real Triton with a model for each interface."""
    repository = tmp_path_factory.mktemp("stand-ins")
    for interface in STAND_INS:
        (repository / interface / "1").mkdir(parents=True)
        shutil.copy(STAND_IN, repository / interface / "1")
        export, live = (exports / "onnx").resolve(), repository / interface / "live"
        config = config_of(interface, export, live)
        (repository / interface / "config.pbtxt").write_text(config)
    return start_triton(repository)


@pytest.fixture
def backend_of(request: pytest.FixtureRequest, exports: Path) -> Callable[[str], Any]:
    """`async with backend_of(kind) as (backend, running)`; `running()` counts its requests."""

    @asynccontextmanager
    async def started(kind: str) -> AsyncIterator[tuple[Backend, Any]]:
        backend, running = make(kind)
        await backend.start()
        try:
            assert await backend.ready()
            yield backend, running
        finally:
            await backend.close()

    def make(kind: str) -> tuple[Any, Any]:
        if kind == "embedded":
            config = EmbeddedConfig(type="embedded", path=exports / "onnx", threads=1)
            backend = EmbeddedBackend.from_config("python-lm", config)

            async def running() -> int:
                assert backend.stats is not None
                return backend.stats.running

            return backend, running
        if kind in ("vllm", "openai"):
            server: VllmServer = request.getfixturevalue("vllm")
            http = HttpConfig(type=kind, url=server.url, model=server.served_name)
            return (client := OpenAiHttpBackend("python-lm", http)), running_of(client)
        name = kind.partition(" ")[2]
        triton: TritonServer = request.getfixturevalue("stand_ins" if name else "triton")
        grpc = triton_at(
            triton.grpc_address,
            model=name or "python-lm",
            tokenizer=exports / "onnx",
            metrics_url=triton.metrics_url,
        )

        live = live_of(triton.model_repository / name / "live") if name else None
        return TritonBackend("python-lm", grpc), live

    return started


def running_of(backend: OpenAiHttpBackend) -> Any:
    async def running() -> int:
        report = await backend.load()
        assert report is not None
        return report.running

    return running


def live_of(told: Path) -> Any:
    async def running() -> int:
        return int(told.read_text())

    return running


@pytest.mark.parametrize(("kind", "check"), owed(KINDS, NO_LOGPROBS))
async def test_contract(backend_of: Any, exports: Path, kind: str, check: Check) -> None:
    ids = tuple(Tokenizer.load(exports / "checkpoint").encode(PROMPT))
    async with backend_of(kind) as (backend, _):
        await check(backend, PROMPT, ids)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "triton"])
async def test_a_client_that_goes_away_frees_the_backend(backend_of: Any, kind: str) -> None:
    """Of our entry, test_triton_entry.py sees it by the next request: it has one slot there."""
    async with backend_of(kind) as (backend, running):
        started = time.perf_counter()
        await collect(backend, ask(backend, PROMPT, max_tokens=16))
        step_s = (time.perf_counter() - started) / 16
        closed_s, cancelled_s = await freed_within(backend, PROMPT, running)
    print(
        f"\n{kind}: freed {closed_s * 1000:.0f} ms after a close, {cancelled_s * 1000:.0f} ms "
        f"after a cancelled task; a token takes it {step_s * 1000:.0f} ms"
    )
    # A server stops between two of its steps, which take long on a busy machine.
    assert max(closed_s, cancelled_s) < FREED_S + 3 * step_s


async def test_vllm_says_how_busy_it_is_and_how_long_its_context(
    backend_of: Any, vllm: VllmServer
) -> None:
    async with backend_of("vllm") as (backend, _):
        assert backend.context_length == vllm.max_model_len
        streams = [backend.generate(ask(backend, PROMPT, max_tokens=900)) for _ in range(3)]
        for stream in streams:
            await anext(stream)
        report = await backend.load()
        for stream in streams:
            await stream.aclose()
    print(f"\n{report}")
    assert report is not None and 1 <= report.running <= 3 and report.waiting == 0
    assert report.kv_usage is not None and 0 < report.kv_usage < 1
    assert report.capacity_tokens is not None and report.capacity_tokens > vllm.max_model_len


@pytest.fixture
async def mortal(
    exports: Path, start_triton: Callable[[Path], TritonServer], tmp_path: Path
) -> AsyncIterator[tuple[TritonServer, TritonBackend]]:
    """A real Triton of one test's own, which it may kill, and a client of it."""
    shutil.copytree(exports / "triton_models", tmp_path / "models")
    server = start_triton(tmp_path / "models")
    config = triton_at(server.grpc_address, model="python-lm")
    backend = TritonBackend("python-lm", config)
    await backend.start()
    try:
        yield server, backend
    finally:
        await backend.close()


async def test_a_killed_triton_is_seen_at_once(mortal: tuple[TritonServer, TritonBackend]) -> None:
    server, backend = mortal
    holding = asyncio.create_task(backend.hold())
    stream = backend.generate(ask(backend, PROMPT, max_tokens=900))
    await anext(stream)
    assert not holding.done()
    assert server.process is not None
    os.killpg(server.process.pid, signal.SIGKILL)
    started = time.perf_counter()
    async with asyncio.timeout(2):
        await holding
    print(f"\nseen after {(time.perf_counter() - started) * 1000:.0f} ms")
    with pytest.raises(BackendError) as failed:
        _ = [event async for event in stream]
    assert failed.value.kind == "lost"
    async with asyncio.timeout(60):
        kind = "lost"
        while kind == "lost":  # over the old connection, as long as gRPC has not seen its end
            with pytest.raises(BackendUnavailable) as failed:
                await backend.probe()
            kind = failed.value.kind
    assert kind == "refused"


async def test_a_model_whose_process_was_killed_is_dead_though_triton_calls_it_ready(
    mortal: tuple[TritonServer, TritonBackend],
) -> None:
    server, backend = mortal
    await backend.probe()
    for stub in stubs_of(server):
        os.kill(stub, signal.SIGKILL)
    async with asyncio.timeout(60):
        with pytest.raises(BackendUnavailable, match="not healthy") as failed:
            while True:  # until Triton has seen it
                await backend.probe()
    assert failed.value.kind == "dead" and await backend.ready()


def stubs_of(server: TritonServer) -> list[int]:
    """Process ids of the server's Python models."""
    assert server.process is not None
    found = [pid for pid in processes_of_group(server.process.pid) if is_stub(pid)]
    assert found
    return found
