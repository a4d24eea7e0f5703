"""Real vLLM servers prove what they serve: to the gateway under load, and to `octet verify URL`.

One of two backends is killed under load and comes back with a broken checkpoint. Everything that
clients are answered is compared with what the right one says, on prompts whose next tokens are no
close call, so that the last bits of a batch do not change them.
"""

import asyncio
import json
import re
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import aiohttp
import pytest
import yaml

from octet.artifacts.golden import GoldenRecord, GoldenSet
from tests.integration.conftest import EXAMPLE
from tests.integration.servers.launch import GatewayServer, VllmServer
from tests.integration.servers.process import free_port
from tests.integration.test_gateway import kill
from tests.integration.test_verify_url import verify
from tests.proof_servers import halve_weight_scales

MODEL = "python-lm"
TOKENS = 3  # of an answer
CLEAR = 1.0  # nats between the two likeliest tokens; rounding moves them by a tenth of that
LAYER = 3  # whose weight scales are halved


@dataclass
class Fleet:
    """Two vLLM servers of one export, and what is wrong that the second may serve instead."""

    export: Path
    broken: Path
    right: VllmServer
    other: VllmServer
    directory: Path

    def gateway(self) -> GatewayServer:
        """With settings of proof as they are by default, but for a probe whenever one is due."""
        port = free_port()
        backends = [
            {"name": name, "type": "vllm", "url": server.url}
            for name, server in (("right", self.right), ("other", self.other))
        ]
        pool = {
            "backends": backends,
            "routing": {"policy": "round_robin"},  # both take part, however slow
            "proof": {"golden": str(self.export), "every_s": 1.0},
        }
        config = self.directory / "gateway.yaml"
        content = {"listen": {"port": port}, "models": {MODEL: {"pool": pool}}}
        config.write_text(yaml.safe_dump(content))
        return GatewayServer(config=config, port=port, log=self.directory / "gateway.log")


@pytest.fixture(scope="module")
def fleet(
    exports: Path,
    start_vllm: Callable[..., VllmServer],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Fleet]:
    """Servers of this module alone: they are killed. `start_vllm` says whether they can run."""
    directory = tmp_path_factory.mktemp("proof")
    export = exports / "checkpoint"
    broken = halve_weight_scales(export, directory / "halved", LAYER)
    servers = [
        VllmServer(model=export, served_name=MODEL, threads=1, log=directory / f"{name}.log")
        for name in ("right", "other")
    ]
    with ExitStack() as stack, ThreadPoolExecutor() as together:
        list(together.map(stack.enter_context, servers))
        yield Fleet(export, broken, servers[0], servers[1], directory)


@dataclass
class Answer:
    """What a client got: as far as it came."""

    prompt: int
    status: int
    text: str
    whole: bool


@dataclass
class Clients:
    """Some clients, each asking again as soon as it has its answer; half of them streamed."""

    url: str
    prompts: Sequence[str]
    workers: int = 6
    pause_s: float = 0.0  # before it asks again: while a server starts, which needs the same cores
    answers: list[Answer] = field(default_factory=list)
    _stopping: bool = False

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(self.url)
        self._tasks = [asyncio.create_task(self._work(n)) for n in range(self.workers)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping = True
        await asyncio.gather(*self._tasks)
        await self._session.close()

    async def more(self, count: int) -> None:
        """Waits for so many more whole answers."""
        wanted = self.whole + count
        async with asyncio.timeout(300):
            while self.whole < wanted:
                await asyncio.sleep(0.05)

    @property
    def whole(self) -> int:
        return sum(answer.whole for answer in self.answers)

    async def _work(self, number: int) -> None:
        turn = number
        while not self._stopping:
            prompt = turn % len(self.prompts)
            self.answers.append(await self._ask(prompt, streamed=bool(number % 2)))
            await asyncio.sleep(self.pause_s)
            turn += self.workers + 1

    async def _ask(self, prompt: int, *, streamed: bool) -> Answer:
        body = question(self.prompts[prompt]) | {"stream": streamed}
        async with self._session.post("/v1/completions", json=body) as response:
            if response.status != 200:
                return Answer(prompt, response.status, "", whole=False)
            if not streamed:
                text = (await response.json())["choices"][0]["text"]
                return Answer(prompt, 200, text, whole=True)
            text, whole = "", False
            async for line in response.content:
                data = line.decode().removeprefix("data: ").strip()
                whole = whole or data == "[DONE]"
                event = json.loads(data) if data.startswith("{") else {}
                whole = whole and "error" not in event
                text += "".join(choice["text"] for choice in event.get("choices", ()))
            return Answer(prompt, 200, text, whole)


def question(prompt: str) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}


def ask(server: VllmServer, prompts: Sequence[str]) -> list[str]:
    """Each prompt's answer by the server itself."""
    found = []
    for prompt in prompts:
        request = urllib.request.Request(
            f"{server.url}/v1/completions",
            json.dumps(question(prompt)).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            found.append(json.load(response)["choices"][0]["text"])
    return found


def clear(record: GoldenRecord) -> bool:
    """Whether none of its next tokens is a close call for the reference."""
    tops = record.tops[:TOKENS]
    return len(tops) == TOKENS and all(t.logprobs[0] - t.logprobs[1] > CLEAR for t in tops)


def backend(gateway: GatewayServer, name: str) -> dict[str, Any]:
    """What /status says of one."""
    with urllib.request.urlopen(f"{gateway.url}/status", timeout=60) as response:
        pools = json.load(response)["pools"]
    (found,) = [x for pool in pools.values() for x in pool["backends"] if x["name"] == name]
    return dict(found)


async def until(
    gateway: GatewayServer, name: str, reached: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """Waits until /status says of the backend `name` what is wanted; all that it says then."""
    async with asyncio.timeout(300):
        while True:
            found = await asyncio.to_thread(backend, gateway, name)
            if reached(found):
                return found
            await asyncio.sleep(0.1)


async def until_proof(gateway: GatewayServer, name: str, state: str) -> dict[str, Any]:
    return await until(gateway, name, lambda found: found["proof"]["state"] == state)


async def serve(server: VllmServer, model: Path, *, hide: bool = False) -> None:
    """Starts a server that was killed on another checkpoint, at the same address.

    With `hide`, the weights are gone from the disk before it answers, as if it ran on another
    machine: then nothing but its numbers tells what it loaded.
    """
    server.model = model
    server.log.unlink()
    starting = asyncio.create_task(asyncio.to_thread(server.start))
    while hide and not starting.done():
        if server.log.exists() and "Loading weights took" in server.log.read_text(errors="replace"):
            (model / "model.safetensors").unlink()
            break
        await asyncio.sleep(0.05)
    await starting


def written(gateway: GatewayServer, name: str) -> float:
    """Tokens that clients got from one."""
    with urllib.request.urlopen(f"{gateway.url}/metrics", timeout=60) as response:
        text = response.read().decode()
    found = re.findall(r"^octet_tokens_total{(.*?)} (\S+)$", text, re.MULTILINE)
    wanted = {f'backend="{name}"', 'type="output"'}
    return sum(float(value) for labels, value in found if wanted <= set(labels.split(",")))


async def test_a_backend_that_comes_back_broken_gives_no_client_a_token(fleet: Fleet) -> None:
    """And one that comes back right serves again. Probes cost what they may."""
    golden = GoldenSet.load(fleet.export)
    prompts = [record.prompt for record in golden.records if clear(record)]
    expected = await asyncio.to_thread(ask, fleet.right, prompts)
    admitted: dict[str, int] = {}
    with fleet.gateway() as gateway:
        for name in ("right", "other"):
            proof = (await until_proof(gateway, name, "proven"))["proof"]
            admitted[name] = proof["tokens"]
            settings = dict(proof["settings"])
            assert settings.pop("version").startswith("0.")
            assert settings == {
                "engine": "vllm",
                "cache": "fp8_e5m2",
                "context": 1024,
                "prefix caching": "on",
            }
            print(f"\n{name}: admitted by {proof['prompts']} prompts, {proof['tokens']} tokens")
            print(f"  in {proof['last_took_s']:.2f} s: {proof['reason']}")
        async with Clients(gateway.url, prompts) as clients:
            await clients.more(60)
            before = written(gateway, "other")
            assert before > 0
            kill(fleet.other)
            await until(gateway, "other", lambda found: not found["up"])
            gone = written(gateway, "other")
            clients.pause_s = 3.0
            await serve(fleet.other, fleet.broken, hide=True)
            clients.pause_s = 0.0
            refused = await until_proof(gateway, "other", "refused")
            answers = await asyncio.to_thread(ask, fleet.other, prompts)
            code, found = await asyncio.to_thread(verify, fleet.other.url, "--golden", fleet.export)
            await clients.more(60)
            print(f"other: {refused['proof']['reason']}")
            kill(fleet.other)
            still = written(gateway, "other")
            clients.pause_s = 3.0
            await serve(fleet.other, fleet.export)
            clients.pause_s = 0.0
            await until_proof(gateway, "other", "proven")
            await clients.more(60)
            back = written(gateway, "other")
        wrong = sum(a != b for a, b in zip(answers, expected, strict=True))
        print(f"the broken one answers {wrong} of {len(prompts)} prompts wrongly")
        print(f"{len(clients.answers)} answers, {clients.whole} of them whole")
        assert wrong > len(prompts) // 5, "else nobody could tell from which one an answer came"
        assert f"weight scales of layer {LAYER}" in refused["proof"]["reason"]
        assert code == 1
        assert found["verdict"]["cause"]["name"] == f"weight_scales_scaled, layer {LAYER}, x0.5"
        for answer in clients.answers:
            assert answer.status in (200, 503)
            whole = expected[answer.prompt]
            assert answer.text == whole if answer.whole else whole.startswith(answer.text)
        assert 0 < before <= gone == still < back
        spent = backend(gateway, "right")["proof"]
        print(f"right: {spent['tokens']} tokens in {spent['probes']}, a share of {spent['share']}")
        assert spent["tokens"] == admitted["right"] or spent["share"] <= 0.01


async def test_an_unquantized_server_under_the_name_is_found_out(fleet: Fleet) -> None:
    """With the cache's flag as it should be, so that the engine says nothing of it."""
    kill(fleet.other)
    await serve(fleet.other, EXAMPLE / "model")
    code, found = verify(fleet.other.url, "--golden", fleet.export)
    print(f"\nbfloat16: {found['verdict']['reason']}")
    assert code == 1
    assert found["verdict"]["cause"]["name"] == "unquantized"
