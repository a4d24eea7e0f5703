"""Rollouts on real vLLM servers: a corrupted checkpoint, then a good one, and `octet rollout`.

The proof of the canary is switched off, so that nothing but the judge can see what it serves. The
reference is a vLLM server of the unquantized checkpoint, proven on golden prompts.
"""

import asyncio
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from octet.artifacts.golden import GoldenSet
from tests.integration.conftest import EXAMPLE
from tests.integration.servers.launch import GatewayServer, VllmServer
from tests.integration.servers.process import free_port
from tests.proof_servers import halve_weight_scales

MODEL = "python-lm"
LAYER = 3
JUDGE = {
    "reference": "bf16",
    "max_kl": 0.2,  # a limit far from both is decided soon
    "share": 1.0,
    "answer_tokens": 16,
    "tokens_per_minute": 1_000_000,
    "max_in_flight": 4,
}


class Fleet:
    """The unquantized reference, a right FP8 server, and one whose weight scales are halved."""

    def __init__(self, exports: Path, directory: Path) -> None:
        self.export = exports / "checkpoint"
        self.directory = directory
        broken = halve_weight_scales(self.export, directory / "halved", LAYER)
        served = {"bf16": EXAMPLE / "model", "right": self.export, "broken": broken}
        self.servers = {
            name: VllmServer(
                model=model, served_name=MODEL, threads=1, log=directory / f"{name}.log"
            )
            for name, model in served.items()
        }

    def configure(self, canary: str) -> Path:
        """Writes the gateway's file, with one of the servers as the canary."""

        def pool(server: str, **more: Any) -> dict[str, Any]:
            return {"backends": [{"type": "vllm", "url": self.servers[server].url}], **more}

        content = {
            "listen": {"port": self.port},
            "models": {MODEL: {"pool": "main", "canary": [{"pool": "next", "fraction": 0}]}},
            "pools": {
                "main": pool("right", proof={"enabled": False}),
                "bf16": pool("bf16", proof={"golden": str(self.export), "weights": "original"}),
                "next": pool(canary, proof={"enabled": False}, judge=JUDGE),
            },
            "admin": {"port": self.admin_port, "rollouts_file": "rollouts.json"},
        }
        path = self.directory / "gateway.yaml"
        path.write_text(yaml.safe_dump(content))
        return path

    port = admin_port = 0


@pytest.fixture(scope="module")
def fleet(
    exports: Path,
    start_vllm: Callable[..., VllmServer],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Fleet]:
    """`start_vllm` says whether the servers can run; these are of this module alone."""
    fleet = Fleet(exports, tmp_path_factory.mktemp("rollout"))
    fleet.port, fleet.admin_port = free_port(), free_port()
    with ExitStack() as stack, ThreadPoolExecutor() as threads:
        # A server waits for its imports more than it computes: together they start sooner.
        list(threads.map(stack.enter_context, fleet.servers.values()))
        yield fleet


@asynccontextmanager
async def asking(fleet: Fleet, answered: Counter[str]) -> AsyncIterator[None]:
    """Clients of completions, who ask greedily; counts who answered."""
    prompts = [record.prompt for record in GoldenSet.load(fleet.export).records]
    url = f"http://127.0.0.1:{fleet.port}/v1/completions"

    async def ask(session: aiohttp.ClientSession, turn: int) -> None:
        while True:
            body = {"model": MODEL, "prompt": prompts[turn % len(prompts)], "max_tokens": 2}
            async with session.post(url, json=body | {"temperature": 0}) as response:
                assert response.status == 200, await response.text()
                await response.read()
                answered[response.headers["x-octet-backend"].partition("/")[0]] += 1
            turn += 4

    async with aiohttp.ClientSession() as session:
        tasks = [asyncio.create_task(ask(session, n)) for n in range(4)]
        yield
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ended), ended


async def octet_rollout(fleet: Fleet) -> subprocess.CompletedProcess[str]:
    url = f"http://127.0.0.1:{fleet.admin_port}"
    words = ["rollout", MODEL, "next", "--gateway", url, "--steps", "1", "--timeout", "600"]
    command = [sys.executable, "-m", "octet", *words]
    return await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, env=os.environ
    )


async def status_of(fleet: Fleet) -> Any:
    url = f"http://127.0.0.1:{fleet.admin_port}/status"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return await response.json()


async def test_a_corrupted_checkpoint_goes_back_and_a_good_one_is_promoted(fleet: Fleet) -> None:
    """Clients get no token of the first, and after a restart all of the second's."""
    answered: Counter[str] = Counter()
    config = fleet.configure("broken")
    with GatewayServer(config=config, port=fleet.port, log=fleet.directory / "gateway.log") as it:
        async with asking(fleet, answered):
            done = await octet_rollout(fleet)
            print(done.stdout)
            assert done.returncode == 1, done.stderr
            assert "rolled back: it exceeds its limit: " in done.stdout
            assert "gets a share" not in done.stdout
            assert answered.keys() == {"main"}
            judged = (await status_of(fleet))["pools"]["next"]["judged"]
            assert judged["ruling"] == "exceeds" and judged["kl_interval"][0] >= JUDGE["max_kl"]
            assert judged["problem"] is None

            fleet.configure("right")
            async with aiohttp.ClientSession() as session:
                url = f"http://127.0.0.1:{fleet.admin_port}/admin/reload"
                async with session.post(url) as response:
                    assert response.status == 200, await response.text()
            assert answered.keys() == {"main"}  # the other checkpoint starts without a request
            done = await octet_rollout(fleet)
            print(done.stdout)
            assert (done.returncode, done.stderr) == (0, "")
        assert answered.keys() == {"main", "next"}
        judged = (await status_of(fleet))["pools"]["next"]["judged"]
        assert judged["ruling"] == "within" and judged["agreement"] > 0.8

        it.stop()
        it.start()
        answered.clear()
        async with asking(fleet, answered):
            while answered.total() < 8:
                await asyncio.sleep(0.1)
        assert answered.keys() == {"next"}
