"""The gateway on a real loopback socket, and clients for it."""

import asyncio
import itertools
import json
import random
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from serve.admission.admission import Admission
from serve.backends.base import Backend
from serve.config import GatewayConfig, Health, PoolConfig
from serve.config.checks import load_config
from serve.engine.request import GenerateRequest
from serve.engine.sampler import Sampling
from serve.gateway.state import Gateway
from serve.routing import Pool
from serve.routing.pool import FIRST_PROOF_S
from serve.run import DrainingServer, bind, serve_gateway
from tests.serve.waiting import until

if TYPE_CHECKING:
    from octet.artifacts.golden import GoldenSet
    from serve.runner.onnx import OnnxRunner
    from tests.fake_servers import FakeOpenAI
    from tests.serve.fake_gpu import FakeGpu
    from tests.shared import Shared


class Served:
    """A running gateway, its base URL, and a session to talk to it."""

    def __init__(self, gateway: Gateway, server: DrainingServer, url: str) -> None:
        self.gateway = gateway
        self.server = server
        self.url = url
        self.session = aiohttp.ClientSession(url)

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and JSON of the answer."""
        data = body if isinstance(body, str | bytes) else json.dumps(body)
        headers = {"content-type": "application/json"}
        async with self.session.post(path, data=data, headers=headers) as response:
            return response.status, await response.json()

    async def events(self, path: str, body: dict[str, Any]) -> list[str]:
        """The data of each server-sent event of a streamed answer."""
        async with self.session.post(path, json=body | {"stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            lines = (await response.text()).split("\n\n")
        assert lines.pop() == ""
        assert all(line.startswith("data: ") for line in lines), lines
        return [line.removeprefix("data: ") for line in lines]

    async def metric(self, name: str, **labels: str) -> float:
        """A sample's value, once the requests whose answers have arrived are counted."""
        await self.idle()
        value = self.gateway.metrics.registry.get_sample_value(name, labels)
        return value or 0.0

    async def idle(self, timeout_s: float = 60.0) -> None:
        """Waits until no request is in flight; fails if that takes too long."""
        async with asyncio.timeout(timeout_s):
            await until(lambda: not (self.gateway.running or self._in_flight()))

    def _in_flight(self) -> float:
        (gauge,) = self.gateway.metrics.in_flight.collect()
        return sum(sample.value for sample in gauge.samples)


@asynccontextmanager
async def serving(*pools: tuple[str, list[Backend]], **settings: Any) -> AsyncIterator[Served]:
    """A gateway over the given pools, drained and closed at the end.

    Each is a model of its own, unless `settings` has `models`; `pools` in it has their settings.
    """
    config = GatewayConfig.model_validate(
        {"models": {name: {"pool": name} for name, _ in pools}, "drain_timeout_s": 0.5} | settings
    )
    # A probe would be one more request than the test sent.
    quiet = PoolConfig(health=Health(probe_after_s=None))
    made = {name: Pool.of(name, found, config.pools.get(name, quiet)) for name, found in pools}
    async with serving_gateway(Gateway(config, made)) as served:
        yield served


@asynccontextmanager
async def serving_gateway(
    gateway: Gateway, admin: socket.socket | None = None, *, patience_s: float = FIRST_PROOF_S
) -> AsyncIterator[Served]:
    """Any gateway on a socket, drained and closed at the end; proven, if that is soon."""
    listener = bind("127.0.0.1", 0)
    servers: list[DrainingServer] = []
    task = asyncio.create_task(
        serve_gateway(gateway, listener, admin, on_started=servers.append, patience_s=patience_s)
    )
    while not servers:
        await asyncio.sleep(0.01)
        if task.done():
            task.result()
    served = Served(gateway, servers[0], f"http://127.0.0.1:{listener.getsockname()[1]}")
    try:
        yield served
    finally:
        await served.session.close()
        if not gateway.draining:
            servers[0].handle_exit(signal.SIGTERM, None)
        await task
        listener.close()


def configured(path: Path, text: str) -> Gateway:
    """The gateway of a configuration that is written to `path`."""
    path.write_text(text)
    gateway = Gateway.from_config(load_config(path))
    gateway.path = path
    return gateway


@pytest.fixture(autouse=True)
def _seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds which backend is chosen, which prompts prove it, and tokens drawn without a seed."""
    draws, samplings = itertools.count(), itertools.count()
    seeded = SimpleNamespace(Random=lambda: random.Random(next(draws)))
    for module in ("routing.pool", "routing.retry_budget", "routing.route", "gateway.capture"):
        monkeypatch.setattr(f"serve.{module}.random", seeded)
    of = Sampling.of

    def sampling(request: GenerateRequest) -> Sampling:
        seed = next(samplings) if request.seed is None else request.seed
        return of(replace(request, seed=seed))

    monkeypatch.setattr(Sampling, "of", sampling)


@pytest.fixture(autouse=True)
def _queues_by_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queues go by the event loop's clock: it gives the deadlines that they compare with theirs.

    A test's loop falls behind the machine's clock where the machine is busy.
    """

    def now() -> float:
        try:
            return asyncio.get_running_loop().time()
        except RuntimeError:  # outside of a loop, nothing waits
            return time.monotonic()

    monkeypatch.setitem(Admission.__init__.__kwdefaults__, "clock", now)


@pytest.fixture
async def one_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """What requests are told to have taken is of the event loop's clock, as deadlines are."""
    now = asyncio.get_running_loop().time
    clock = SimpleNamespace(monotonic=now, perf_counter=now)
    for module in (
        "api.request.attempts",
        "api.request.exchange",
        "telemetry.observation",
    ):
        monkeypatch.setattr(f"serve.{module}.time", clock)


@pytest.fixture
async def embedded() -> AsyncIterator[Served]:
    """A gateway over the embedded engine with the fake model, as `fake`."""
    from tests.fakes import FakeRunner, fake_backend

    async with serving(("fake", [fake_backend(FakeRunner())])) as served:
        yield served


@pytest.fixture
async def upstreams() -> "AsyncIterator[list[FakeOpenAI]]":
    """Three servers of the model `fake`, 5 ms a token."""
    from tests.fake_servers import FakeOpenAI, running

    async with AsyncExitStack() as stack:
        servers = [FakeOpenAI(delay_s=0.005) for _ in range(3)]
        yield [await stack.enter_async_context(running(server)) for server in servers]


@pytest.fixture(scope="session")
def exports(tiny_model: Path, shared: "Shared") -> dict[str, Path]:
    """ONNX exports of the tiny model: recipes with an E5M2 cache, and `plain`."""
    recipes = ("fp8", "fp8-static", "mxfp8", "mxfp4", "nvfp4")

    def build(root: Path) -> None:
        from export.onnx.write import export_onnx
        from octet.recipe import Recipe
        from tests.export.conftest import make_calibration

        for recipe in recipes:
            make_calibration(root / f"{recipe}-calibration", tiny_model, Recipe.load(recipe))
            export_onnx(root / f"{recipe}-calibration", root / recipe, kv_cache="e5m2")
        export_onnx(root / "fp8-calibration", root / "plain", quantize=False)

    root = shared.directory("serve-exports", build)
    return {name: root / name for name in (*recipes, "plain")}


@pytest.fixture(scope="session")
def engine_calibration(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the tiny model, with static scales, and cache scales of 0.3: dropped, they would show."""
    from octet.recipe import Recipe
    from tests.export.conftest import make_calibration

    scales = {
        f"model.layers.{i}.self_attn.{kind}_scale{cache}": 0.3
        for i in (0, 1)
        for kind in "kv"
        for cache in ("", "_e4m3", "_e5m2")
    }
    path = tmp_path_factory.mktemp("tensorrt") / "calibration"
    return make_calibration(path, tiny_model, Recipe.load("fp8-static"), scales=scales)


@pytest.fixture(scope="session")
def engines(engine_calibration: Path) -> Callable[[str], Path]:
    """The engine with a given cache, for the fakes of a GPU and of TensorRT."""
    from tests.serve.engines import make_engine

    def engine(cache: str) -> Path:
        path = engine_calibration.parent / cache
        return path if path.exists() else make_engine(engine_calibration, path, kv_cache=cache)

    return engine


@pytest.fixture(scope="session")
def references(engine_calibration: Path) -> "Callable[[str], OnnxRunner]":
    """ONNX Runtime's runner of the same calibration, with a given cache."""
    from export.onnx.write import export_onnx
    from serve.runner.onnx import OnnxRunner

    def reference(cache: str) -> OnnxRunner:
        path = engine_calibration.parent / f"{cache}-onnx"
        if not path.exists():
            export_onnx(engine_calibration, path, kv_cache=cache)
        return OnnxRunner(path, threads=2)

    return reference


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> "FakeGpu":
    """This machine, as one with an SM89 GPU and TensorRT."""
    from tests.serve.engines import install
    from tests.serve.fake_gpu import FakeGpu

    gpu = FakeGpu()
    install(monkeypatch, gpu)
    return gpu


@pytest.fixture(scope="session")
def proof_golden(proof_calibration: Path) -> "GoldenSet":
    """Its 16 golden records."""
    from octet.artifacts.golden import GoldenSet

    return GoldenSet.load(proof_calibration)


@pytest.fixture(scope="session")
def proof_calibration(example_model: Path, example_samples: Path, shared: "Shared") -> Path:
    """Recipe fp8 of the trained example (a random model agrees with anything), with 16 golden
    records, and what is expected of three paths."""

    def build(root: Path) -> None:
        golden = make_proof_golden(example_model, example_samples)
        make_proof_calibration(root / "calibration", example_model, golden)

    return shared.directory("serve-proof", build) / "calibration"


def make_proof_golden(example_model: Path, example_samples: Path) -> "GoldenSet":
    import json

    from calibrate.golden import golden_set
    from octet.model.checkpoint import Checkpoint
    from serve.engine.tokenizer import Tokenizer

    lengths = (1, 3, 6, 12, 20, 35, 50, 64, 80, 100, 120, 150, 180, 200, 230, 260)
    tokenizer = Tokenizer.load(example_model)
    lines = (example_samples / "heldout.jsonl").read_text().splitlines()
    texts = [tokenizer.encode(json.loads(line)["text"]) for line in lines]
    long = [ids for ids in texts if len(ids) >= max(lengths)]
    prompts = [(f"prompt {n}", long[i][:n]) for i, n in enumerate(lengths)]
    return golden_set(Checkpoint.open(example_model), prompts)


def make_proof_calibration(path: Path, example_model: Path, golden: "GoldenSet") -> None:
    from calibrate.simulate.predict import predict
    from octet.artifacts.calibration import Calibration
    from octet.artifacts.scenarios import ScenarioSet
    from octet.artifacts.serving_path import ServingPath
    from octet.model.checkpoint import Checkpoint
    from octet.recipe import Recipe
    from tests.export.conftest import make_calibration
    from tests.serve.engines import rewritten

    paths = [
        ServingPath(kv_cache="e5m2", compute="float32"),
        ServingPath(kv_cache="float16", compute="float32"),
        ServingPath(kv_cache="e4m3", compute="bfloat16"),
    ]
    recipe, checkpoint = Recipe.load("fp8"), Checkpoint.open(example_model)
    layers = range(checkpoint.spec.layers)
    cache = {f"model.layers.{i}.self_attn.{kind}_scale_e4m3": 0.05 for i in layers for kind in "kv"}
    make_calibration(path, example_model, recipe, scales=cache)
    scales = Calibration.load(path).scales
    predict(checkpoint, recipe, scales, golden, paths).save(path)
    ScenarioSet(golden.weights_sha256, recipe.name, {}).save(path)  # beside every prediction
    golden.save(path)
    rewritten(path)
