"""Two real vLLM servers and a real Triton behind the gateway, while things are killed.

The load is the official client's; a request is lost if it fails before anything of its answer came.
"""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from openai import APIConnectionError

from tests.integration.fleet import MODEL, Fleet, Watch, configuration
from tests.integration.load import Load, Outcome
from tests.integration.servers import layout
from tests.integration.servers.launch import GatewayServer, TritonServer, VllmServer
from tests.integration.servers.process import Server, signal_group
from tests.integration.test_servers import is_stub, processes_of_group

EXAMPLE = Path(__file__).parents[2] / "examples" / "python-lm" / "model"


@pytest.fixture(scope="module")
def fleet(
    exports: Path,
    start_vllm: Callable[..., VllmServer],
    triton: TritonServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Fleet]:
    """Servers of this module alone: they are killed. `start_vllm` says whether they can run."""
    directory = tmp_path_factory.mktemp("fleet")
    servers: dict[str, Server] = {
        name: VllmServer(
            model=exports / "checkpoint",
            served_name=MODEL,
            threads=1,  # of two cores, which three servers share
            shutdown_s=60,
            log=directory / f"{name}.log",
        )
        for name in ("vllm-a", "vllm-b")
    }
    servers["triton"] = TritonServer(
        model_repository=exports / "triton_models", log=directory / "triton.log"
    )
    with ExitStack() as stack, ThreadPoolExecutor() as together:
        list(together.map(stack.enter_context, servers.values()))
        yield Fleet(servers, configuration(servers, exports), directory)


@pytest.fixture
def gateway(fleet: Fleet) -> Iterator[GatewayServer]:
    with fleet.gateway() as running:
        yield running


@pytest.fixture
async def watch(gateway: GatewayServer) -> Any:
    watch = Watch(gateway.url)
    yield watch
    await watch.close()


def kill(server: Server) -> None:
    """SIGKILL to every process of the server."""
    assert server.process is not None
    signal_group(server.process.pid, signal.SIGKILL)
    server.process.wait()


@pytest.mark.parametrize("victim", ["vllm-a", "triton"])
async def test_a_killed_backend_costs_no_request_without_a_token(
    victim: str, fleet: Fleet, gateway: GatewayServer, watch: Watch
) -> None:
    server = fleet.servers[victim]
    async with Load(gateway.url, MODEL) as load:
        await watch.busy(victim)
        kill(server)
        out_s = await watch.until(victim, available=False)
        await load.completed(20)
        before = await watch.answered(victim)
        load.pause_s = 3.0
        await asyncio.to_thread(server.start)
        load.pause_s = 0.0
        back_s = await watch.until(victim, available=True)
        async with asyncio.timeout(300):
            while await watch.answered(victim) == before:
                await asyncio.sleep(0.05)
        await load.completed(10)
    print(f"\n{victim}: out after {out_s:.2f} s, back {back_s:.2f} s after it was ready;")
    print(f"  {load.summary()}")
    assert out_s < 5 and back_s < 10
    assert not load.lost, load.summary()
    assert all(victim in str(o.error) for o in load.broken), "an error event names the backend"


async def test_triton_over_a_dead_model_is_found_out(
    fleet: Fleet, gateway: GatewayServer, watch: Watch
) -> None:
    """Triton goes on saying READY of a Python model whose process was killed."""
    server = fleet.servers["triton"]
    assert isinstance(server, TritonServer) and server.process is not None
    stubs = [pid for pid in processes_of_group(server.process.pid) if is_stub(pid)]
    assert stubs
    async with Load(gateway.url, MODEL) as load:
        await load.completed(10)
        for pid in stubs:
            os.kill(pid, signal.SIGKILL)
        out_s = await watch.until("triton", available=False)
        await load.completed(20)
        assert not await watch.available("triton")
        await asyncio.to_thread(server.stop)
        load.pause_s = 3.0
        await asyncio.to_thread(server.start)
        load.pause_s = 0.0
        back_s = await watch.until("triton", available=True)
        await load.completed(10)
    print(f"\ndead stub: out after {out_s:.2f} s, back {back_s:.2f} s after; {load.summary()}")
    assert out_s < 5 and back_s < 10
    assert not load.lost, load.summary()


async def test_sigterm_under_load_finishes_what_began(
    fleet: Fleet, gateway: GatewayServer, watch: Watch
) -> None:
    process = gateway.process
    assert process is not None
    async with Load(gateway.url, MODEL, max_tokens=80) as load:
        await load.completed(8)
        load.hold()
        begun = await arrived(load, watch)
        process.send_signal(signal.SIGTERM)
        at = time.monotonic()
        async with aiohttp.ClientSession(gateway.url) as session:
            not_ready_s = await first_refusal(session, at)
        load.go_on()
        code = await asyncio.to_thread(process.wait, 300)
        ended_s = time.monotonic() - at
        load.stop()
    print(f"\nnot ready after {not_ready_s * 1e3:.0f} ms, ended after {ended_s:.2f} s: {code}")
    print(f"  {load.summary()}")
    assert code == 0
    assert any(o.ended > at for o in begun), "nothing was under way"
    assert all(o.error is None for o in begun), load.summary()
    refused = [o.error for o in load.outcomes if o.error is not None]
    for error in refused:  # once it has ended, nobody says anything
        told = getattr(error, "status_code", None) == 503
        assert told or isinstance(error, APIConnectionError), load.summary()


async def arrived(load: Load, watch: Watch) -> list[Outcome]:
    """The requests under way, once the gateway has them all; no new ones may be sent."""
    async with asyncio.timeout(300):
        while True:
            sent = load.under_way
            there = await watch.metric("octet_requests_in_flight", endpoint="/v1/completions")
            if sent == load.under_way and len(sent) == there:
                return sent
            await asyncio.sleep(0.01)


async def first_refusal(session: aiohttp.ClientSession, since: float) -> float:
    """Seconds from `since` until /ready says 503."""
    async with asyncio.timeout(300):
        while True:
            async with session.get("/ready") as response:
                if response.status == 503:
                    return time.monotonic() - since


async def test_reloads_under_load_lose_nothing(
    fleet: Fleet, gateway: GatewayServer, watch: Watch
) -> None:
    """Backends come and go, the policy changes, a broken file is refused: ten times over."""
    process = gateway.process
    assert process is not None
    (model,) = fleet.config["models"].values()
    backends = model["pool"]["backends"]
    async with Load(gateway.url, MODEL) as load:
        for turn in range(10):
            await load.completed(3)
            left = [b for i, b in enumerate(backends) if i != turn % 3]
            pool = {"backends": left if turn % 2 else backends}
            pool["routing"] = {"policy": ("round_robin", "power_of_two", "prefix")[turn % 3]}
            fleet.write(gateway.config, gateway.port, models={MODEL: {"pool": pool}})
            if turn == 4:
                gateway.config.write_text("models: {nothing: here}")
            outcome = "failed" if turn == 4 else "ok"
            before = await watch.metric("octet_reloads_total")
            process.send_signal(signal.SIGHUP)
            async with asyncio.timeout(300):
                while await watch.metric("octet_reloads_total") == before:
                    await asyncio.sleep(0.05)
            assert await watch.metric("octet_reloads_total", outcome=outcome) >= 1
        await load.completed(10)
    print(f"\n{load.summary()}")
    assert not load.lost and not load.broken, load.summary()
    assert await watch.metric("octet_reloads_total", outcome="ok") == 9


BENCH = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_vllm_bench_serve_runs_unmodified(
    backend: str, gateway: GatewayServer, tmp_path: Path
) -> None:
    """`vllm bench serve` by its module: the command looks for a distribution called vllm."""
    endpoint = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}[backend]
    command = [str(layout.python(layout.VLLM)), "-P", "-c", BENCH]
    command += ["--backend", backend, "--base-url", gateway.url, "--endpoint", endpoint]
    command += ["--model", MODEL, "--tokenizer", str(EXAMPLE), "--dataset-name", "random"]
    command += ["--num-prompts", "40", "--random-input-len", "64", "--random-output-len", "16"]
    command += ["--max-concurrency", "8", "--ignore-eos"]
    command += ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "bench.json"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    result = yaml.safe_load((tmp_path / "bench.json").read_text())
    print(f"\n{result['completed']} completed, {result['total_output_tokens']} tokens")
    assert result["completed"] == 40 and result.get("failed", 0) == 0
    assert result["total_output_tokens"] == 40 * 16


@pytest.mark.parametrize(
    ("victim", "how"), [("vllm-a", "its engine dies"), ("vllm-b", "it is told to stop")]
)
async def test_a_vllm_that_answers_while_it_ends_costs_no_request_without_a_token(
    victim: str, how: str, fleet: Fleet, gateway: GatewayServer, watch: Watch
) -> None:
    """Its API server lives on for a while: it says 500, or 200 with nothing in it."""
    server = fleet.servers[victim]  # not started again: nobody comes after this
    assert server.process is not None
    async with Load(gateway.url, MODEL) as load:
        await watch.busy(victim)
        if how == "it is told to stop":
            server.process.send_signal(signal.SIGTERM)
        else:
            (core,) = filter(is_engine_core, processes_of_group(server.process.pid))
            os.kill(core, signal.SIGKILL)
        out_s = await watch.until(victim, available=False)
        await load.completed(20)
    print(f"\n{victim}, {how}: out after {out_s:.2f} s; {load.summary()}")
    assert out_s < 5
    assert not load.lost, load.summary()
    assert how == "its engine dies" or not load.broken, "it finishes what it has"


def is_engine_core(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"VLLM::EngineCore")
    except OSError:  # it has ended
        return False
