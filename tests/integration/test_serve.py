"""`octet serve` with the real vLLM (CPU build): from a model to a proven service in one command.

The recipe is fp8-block, which vLLM serves weight-only on a CPU with AMX: so its proof as native is
refused, and as weight-only passes.
"""

import asyncio
import json
import os
import re
import signal
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.integration.conftest import EXAMPLE, require
from tests.integration.servers import layout
from tests.integration.servers.launch import VllmServer, cpu_flags
from tests.integration.servers.process import Server, free_port
from tests.serve.process import members, octet_serve

CHARACTERS = 250  # of each sample
MODEL = "model"  # the name of its directory
BODY = {"model": MODEL, "prompt": "def f(", "max_tokens": 32, "ignore_eos": True}


@dataclass(kw_only=True)
class Service(Server):
    """`octet serve` with these words, and vLLM's CPU build."""

    words: tuple[str, ...]
    options: tuple[str, ...] = ("--enforce-eager",)
    port: int = field(default_factory=free_port)
    ready_seconds: float = 1200.0  # two starts of vLLM after a calibration, on a busy machine

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def ready_url(self) -> str:
        return f"{self.url}/ready"

    def command(self) -> list[str]:
        python = str(layout.python(layout.VLLM))
        words = [*self.words, "--python", python, "--port", str(self.port), "--fallback"]
        return [sys.executable, "-m", "octet", "serve", *words, "--", *self.options]

    def environment(self) -> dict[str, str]:
        return VllmServer(model=Path(), log=Path()).environment()

    def status(self) -> Any:
        request = urllib.request.Request(
            f"{self.url}/status", headers={"accept": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def complete(self) -> Any:
        """The headers of an answer."""
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            data=json.dumps(BODY).encode(),
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == BODY["max_tokens"]
            return answer.headers

    def vllm(self) -> int:
        """The process id of vLLM's server that was started last."""
        return int(re.findall(r"APIServer pid=(\d+)", self.log.read_text(errors="replace"))[-1])


@contextmanager
def running(service: Service) -> Iterator[Service]:
    began = time.monotonic()
    with service:
        print(f"\n{' '.join(service.words)}: proven after {time.monotonic() - began:.0f} s")
        yield service


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require(layout.VLLM)
    if not {"avx512f", "amx_tile"} <= cpu_flags():
        pytest.skip("vLLM's CPU build serves fp8-block only with AMX: use such a machine")
    folder = tmp_path_factory.mktemp("service")
    lines = (EXAMPLE / "samples" / "calibration.jsonl").read_text().splitlines()[:128]
    texts = (json.loads(line)["text"][:CHARACTERS] for line in lines)
    samples = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "samples.jsonl").write_text(samples)
    return folder / "kept"


def words(kept: Path, way: str) -> tuple[str, ...]:
    model, samples = str(EXAMPLE / "model"), str(kept.parent / "samples.jsonl")
    more = ("--recipe", "fp8-block", "--way", way, "--out", str(kept))
    return (model, "--samples", samples, *more)


def engine_of(server: int) -> int:
    """The process id of the engine that a server of vLLM started."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            stat, line = (path / "stat").read_text(), (path / "cmdline").read_bytes()
        except OSError:
            continue
        if int(stat.rpartition(")")[2].split()[1]) == server and line.startswith(b"VLLM::Engine"):
            return int(path.name)
    raise AssertionError(f"{server} has no engine")


async def kill_under_load(service: Service, engine: int) -> Counter[str]:
    """What becomes of 48 requests, half of them streamed, when the engine is killed.

    That is when the first of them has a token.
    """
    started = asyncio.Event()

    async def one(session: aiohttp.ClientSession, stream: bool) -> str:
        body = BODY | {"stream": stream, "max_tokens": 400}
        text = ""
        async with session.post(f"{service.url}/v1/completions", json=body) as answer:
            async for piece in answer.content.iter_any():
                text += piece.decode()
                started.set()
        events = text.count('"text"')
        if answer.status == 200 and '"error"' not in text:
            return "whole"
        return "broken after a token" if stream and events else f"lost: {answer.status} {text}"

    async with aiohttp.ClientSession() as session:
        sent = [asyncio.create_task(one(session, bool(i % 2))) for i in range(48)]
        await started.wait()
        os.kill(engine, signal.SIGKILL)
        return Counter(await asyncio.gather(*sent))


async def test_from_a_model_to_a_proven_service_that_survives_its_engine(kept: Path) -> None:
    with running(Service(words=words(kept, "native"), log=kept.parent / "log")) as service:
        assert {path.name for path in kept.iterdir()} == {"calibration", "checkpoint", "onnx"}
        headers = await asyncio.to_thread(service.complete)
        assert headers["x-octet-fallback"] == "weight-only; native refused"
        assert headers["x-octet-precision"] == "fp8-block-weight-only"
        pools = service.status()["pools"]
        assert {name: pool["phase"] for name, pool in pools.items()} == {
            "native": "given_up",
            "weight-only": "started",
            "original": "dormant",
            "onnx": "dormant",
        }
        server = service.vllm()
        outcomes = await kill_under_load(service, engine_of(server))
        print(outcomes)
        assert set(outcomes) <= {"whole", "broken after a token"} and outcomes["whole"]
        assert service.vllm() != server
        (backend,) = service.status()["pools"]["weight-only"]["backends"]
        assert backend["proof"]["state"] == "proven"
        log = service.log.read_text(errors="replace")
        assert log.count("fp8-block-weight-only is proven") == 2
        assert "fp8-block-weight-only | (APIServer" in log
    assert not Path(f"/proc/{service_pid(log)}").exists()


def service_pid(log: str) -> int:
    return int(re.findall(r"APIServer pid=(\d+)", log)[-1])


@pytest.mark.parametrize("process", ["APIServer", "EngineCore"])
def test_vllm_ends_with_a_gateway_that_is_killed_while_it_starts(
    process: str, tmp_path: Path
) -> None:
    """The gateway is killed at the first line in the log of vLLM's server, or of its engine."""
    require(layout.VLLM)
    backend = {
        "type": "vllm",
        "artifact": str(EXAMPLE / "model"),
        "python": str(layout.python(layout.VLLM)),
        "options": ["--enforce-eager"],
        "environment": VllmServer(model=Path(), log=Path()).environment() | {"PYTHONWARNINGS": ""},
    }
    config = {"models": {MODEL: {"pool": "main"}}, "pools": {"main": {"backends": [backend]}}}
    path = tmp_path / "octet.yaml"
    path.write_text(json.dumps(config))
    server = None
    with octet_serve(path) as gateway:
        assert gateway.stderr is not None
        for line in gateway.stderr:
            server = server or re.search(r"APIServer pid=(\d+)", line)
            if re.search(rf"{process}\w* pid=", line):
                break
        assert server is not None, "vLLM did not start"
        group = int(server[1])
        assert len(members(group)) >= {"APIServer": 2, "EngineCore": 3}[process]
        gateway.kill()
        began = time.monotonic()
        while members(group):
            assert time.monotonic() - began < 30.0
            time.sleep(0.1)
        print(f"\nall of vLLM has ended {time.monotonic() - began:.1f} s after its gateway")


def test_the_original_and_then_the_cpu_take_over(kept: Path) -> None:
    service = Service(words=words(kept, "original"), log=kept.parent / "original.log")
    with running(service):
        assert service.complete()["x-octet-precision"] == "original"
        (backend,) = service.status()["pools"]["original"]["backends"]
        assert backend["proof"]["state"] == "proven"
    wrong = ("--no-such-option",)
    log = kept.parent / "onnx.log"
    with running(Service(words=words(kept, "original"), options=wrong, log=log)) as service:
        headers = service.complete()
        assert headers["x-octet-fallback"] == "onnx; original does_not_start"
        assert headers["x-octet-precision"] == "fp8-block-onnx"
    line = "does not start: vLLM ended with code 2: "
    assert re.search(line + r".*error: unrecognized arguments: --no-such-option", log.read_text())
