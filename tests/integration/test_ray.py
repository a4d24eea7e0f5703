"""`octet deploy ray` on a real Ray cluster of this machine: replicas that die, scale, are refused.

Run with -rP for what was measured:

    python tests/integration/servers/setup.py ray vllm
    python -m pytest -n 0 tests/integration/test_ray.py -rP
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, Self

import aiohttp
import numpy as np
import onnx
import pytest
import yaml
from onnx import numpy_helper

from octet.artifacts.manifest import ArtifactWriter, Manifest
from tests.integration.conftest import require
from tests.integration.servers import layout
from tests.integration.servers.launch import VllmServer, cpu_flags
from tests.integration.servers.process import Server, free_port

MODEL = "python-lm"
LAYER = 3  # whose weight scales are halved
TOKENS = 32  # of an answer
PROMPTS = ("def f(", "import ", "class A", "for i in ", "return ", "if x")
PATIENCE_S = 600.0  # on a busy machine; nothing here is a measure of speed
# Prints what Ray Serve knows of the deployments, whenever it changes.
WATCH = """
import json, sys, time
import ray
from ray import serve
ray.init(address=sys.argv[1], log_to_driver=False)
before = None
while True:
    found = serve.status().applications.get("octet")
    deployments = {} if found is None else found.deployments
    now = {n: [d.status, d.message, d.replica_states] for n, d in deployments.items()}
    if now != before:
        print(json.dumps(now), flush=True)
    before = now
    time.sleep(0.2)
"""


@dataclass(kw_only=True)
class RayCluster(Server):
    """A Ray cluster of one machine that claims four CPUs; `directory` has a short path."""

    directory: Path
    port: int = field(default_factory=free_port)
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def ready(self) -> bool:
        words = ["health-check", "--address", self.address]
        return self.ray(*words).returncode == 0

    def ray(self, *words: str) -> "subprocess.CompletedProcess[str]":
        return run([str(layout.RAY / "bin" / "ray"), *words])

    def command(self) -> list[str]:
        return [
            *(str(layout.RAY / "bin" / "ray"), "start", "--head", "--block", "--num-cpus", "4"),
            *("--node-ip-address", "127.0.0.1", "--port", str(self.port)),
            *("--ray-client-server-port", str(free_port())),
            *("--min-worker-port", "0", "--max-worker-port", "0"),  # any that is free
            *("--object-store-memory", "100000000", "--include-dashboard", "false"),
            *("--disable-usage-stats", "--temp-dir", str(self.directory)),
        ]

    def environment(self) -> dict[str, str]:
        # By default Ray gives its HTTP proxy five seconds to start, and then kills it.
        patience = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60"}
        return environment() | patience | dict(self.variables)

    def deploy(self, config: Path) -> "subprocess.CompletedProcess[str]":
        began = time.monotonic()
        done = octet("deploy", "ray", str(config), "--address", self.address)
        print(f"{config.stem}: exit code {done.returncode} after {time.monotonic() - began:.0f} s")
        print(done.stdout, done.stderr)
        return done

    def replicas(self, deployment: str) -> list[int]:
        """The process ids of its replicas, also of those that still prove themselves."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                words = (path / "cmdline").read_bytes()
                parent = (path / "stat").read_text().rpartition(")")[2].split()[1]
                raylet = Path(f"/proc/{parent}/cmdline").read_bytes()
            except OSError:
                continue
            if str(self.directory).encode() in raylet and words.startswith(
                f"ray::ServeReplica:octet:{deployment}".encode()
            ):
                found.append(int(path.name))
        return found

    def logs(self) -> str:
        return "".join(
            path.read_text(errors="replace")
            for path in self.directory.glob("session_*/logs/worker-*.err")
            if not path.parent.parent.is_symlink()
        )


def cpu_ticks(pid: int) -> int:
    """The CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def environment() -> dict[str, str]:
    return {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(layout.REPOSITORY)}


def run(words: list[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        words,
        env=os.environ | environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


# What Ray's HTTP proxies call as they start: the first one never gets further.
LATE_PROXY = """
import os, time
from pathlib import Path
def hold_the_first():
    first = Path(__file__).with_name("first")
    if not first.exists():
        first.write_text(str(os.getpid()))
        time.sleep(3600)
    return []
"""
OTHER = """
import sys, ray
ray.__version__ = "2.59.1"  # what Ray compares with the cluster's
from octet_cli.main import main
main(sys.argv[1:])
"""


def octet(*words: str) -> "subprocess.CompletedProcess[str]":
    return run([str(layout.python(layout.RAY)), "-P", "-m", "octet", *words])


@contextmanager
def started(log: Path, **given: Any) -> Iterator[RayCluster]:
    require(layout.RAY)
    # Ray's sockets are in it, and their paths may have 107 bytes.
    directory = Path(tempfile.mkdtemp(prefix="ray"))
    try:
        with RayCluster(directory=directory, log=log, **given) as cluster:
            yield cluster
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    with started(tmp_path_factory.mktemp("ray") / "ray.log") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()  # Ray's proxy keeps its port through all deployments


@pytest.fixture
def write(tmp_path: Path, port: int) -> Callable[..., Path]:
    def write(name: str, backend: Mapping[str, Any], **engines: Any) -> Path:
        pool = {"backends": [dict(backend)], "retries": {"attempts": 4, "budget": 1.0}}
        content = {
            "listen": {"port": port},
            "models": {MODEL: {"pool": "main"}},
            "pools": {"main": pool},
            "ray": {"gateway_cpus": 0.2, "engines": {"main": {"cpus": 0.2, **engines}}},
        }
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(content))
        return path

    return write


def halve_onnx_scales(export: Path, out: Path) -> None:
    """The ONNX export with the weight scales of a layer halved, as a faulty exporter wrote it."""
    shutil.copytree(export, out)
    model = onnx.load(out / "model.onnx")
    halved = 0
    for tensor in model.graph.initializer:
        if f".layers.{LAYER}." in tensor.name and tensor.name.endswith(".weight_scale"):
            value = numpy_helper.to_array(tensor) * np.float32(0.5)
            tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
            halved += 1
    assert halved == 7
    onnx.save(model, out / "model.onnx")
    manifest = Manifest.load(export, verify=False)
    (out / "manifest.json").unlink()
    ArtifactWriter(out).finish(manifest)


@dataclass
class Answer:
    """What a client got, as far as it came."""

    prompt: int
    status: int  # 0: no answer at all
    text: str
    whole: bool
    backend: str = ""


@dataclass
class Clients:
    """Some clients, each asking again as soon as it has its answer; half of them streamed."""

    url: str
    workers: int = 8
    tokens: int = TOKENS
    answers: list[Answer] = field(default_factory=list)
    _stopping: bool = False

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
        self._session = aiohttp.ClientSession(self.url, timeout=timeout)
        self._tasks = [asyncio.create_task(self._work(n)) for n in range(self.workers)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping = True
        await asyncio.gather(*self._tasks)
        await self._session.close()

    async def more(self, count: int) -> None:
        """Waits for so many more answers."""
        wanted = len(self.answers) + count
        async with asyncio.timeout(PATIENCE_S):
            while len(self.answers) < wanted:
                await asyncio.sleep(0.05)

    async def _work(self, number: int) -> None:
        turn = number
        while not self._stopping:
            self.answers.append(await self.ask(turn % len(PROMPTS), streamed=bool(number % 2)))
            turn += self.workers + 1

    async def ask(self, prompt: int, *, streamed: bool) -> Answer:
        body = {"model": MODEL, "prompt": PROMPTS[prompt], "max_tokens": self.tokens}
        try:
            async with self._session.post(
                "/v1/completions",
                json=body | {"temperature": 0, "stream": streamed, "ignore_eos": True},
            ) as response:
                backend = response.headers.get("x-octet-backend", "")
                if response.status != 200:
                    return Answer(prompt, response.status, await response.text(), False)
                if not streamed:
                    text = (await response.json())["choices"][0]["text"]
                    return Answer(prompt, 200, text, True, backend)
                text, whole = "", False
                async for line in response.content:
                    data = line.removeprefix(b"data: ").strip()
                    if data == b"[DONE]":
                        whole = True
                    elif data and "choices" in (event := json.loads(data)):
                        text += event["choices"][0]["text"]
                return Answer(prompt, 200, text, whole, backend)
        except aiohttp.ClientError as error:
            return Answer(prompt, 0, repr(error), False)

    def lost(self) -> list[Answer]:
        """The answers to requests that ended without a token."""
        return [a for a in self.answers if not a.whole and (a.status != 200 or not a.text)]

    def texts(self) -> dict[int, set[str]]:
        found: dict[int, set[str]] = {}
        for answer in self.answers:
            if answer.whole:
                found.setdefault(answer.prompt, set()).add(answer.text)
        return found


def url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def ready(port: int) -> Any:
    with urllib.request.urlopen(f"{url(port)}/ready", timeout=60) as answer:
        return json.load(answer)


def retries(port: int) -> float:
    """How often the gateway has sent a request again."""
    with urllib.request.urlopen(f"{url(port)}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("octet_retries_total{"))


async def until(condition: Callable[[], bool], what: str) -> float:
    """Waits for it; returns the seconds that it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < PATIENCE_S, what
        await asyncio.sleep(0.2)
    return time.monotonic() - began


async def only_replica(cluster: RayCluster) -> int:
    """The process id of the one replica; Ray forgets one that ends before its process is gone."""
    await until(lambda: len(cluster.replicas("main-1")) == 1, "there is not one replica")
    (found,) = cluster.replicas("main-1")
    return found


@dataclass
class Status:
    """A deployment, as `serve status` shows it."""

    status: str = ""
    message: str = ""
    replicas: Counter[str] = field(default_factory=Counter)


@pytest.fixture
def status(cluster: RayCluster, tmp_path: Path) -> Iterator[Callable[[], Status]]:
    """A function that returns the status of the engine's deployment."""
    seen = tmp_path / "status"
    with seen.open("wb") as output:
        process = subprocess.Popen(
            [str(layout.python(layout.RAY)), "-P", "-c", WATCH, cluster.address],
            env=os.environ | environment(),
            stdout=output,
            stderr=subprocess.DEVNULL,
        )

    def now() -> Status:
        lines = seen.read_text().splitlines()
        found = json.loads(lines[-1]).get("main-1") if lines else None
        return Status(*found[:2], Counter(found[2])) if found else Status()

    yield now
    process.kill()
    process.wait()


def test_a_proxy_that_starts_too_late_is_waited_for(
    exports: Path, write: Callable[..., Path], port: int, tmp_path: Path
) -> None:
    """Ray kills a proxy that is not ready in time, as on a busy machine, and starts another."""
    backend = {"type": "embedded", "path": str(exports / "onnx"), "threads": 1}
    (tmp_path / "late_proxy.py").write_text(LATE_PROXY)
    variables = {
        "PYTHONPATH": f"{layout.REPOSITORY}{os.pathsep}{tmp_path}",
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "late_proxy.hold_the_first",
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "3",
    }
    with started(tmp_path / "ray.log", variables=variables) as cluster:
        done = cluster.deploy(write("late", backend))
        assert done.returncode == 0, done.stderr
        assert not Path("/proc", (tmp_path / "first").read_text()).exists()
        assert ready(port)["models"][MODEL][0]["proof"] == "proven"


async def test_a_replica_that_dies_loses_no_request_without_a_token(
    cluster: RayCluster,
    exports: Path,
    write: Callable[..., Path],
    port: int,
    status: Callable[[], Status],
) -> None:
    backend = {"type": "embedded", "path": str(exports / "onnx"), "threads": 1}
    config = write("two", backend, min_replicas=2, max_replicas=2)
    assert cluster.deploy(config).returncode == 0
    assert ready(port)["models"][MODEL][0]["proof"] == "proven"
    # Long answers: some are in progress at any time.
    async with Clients(url(port), workers=16, tokens=256) as clients:
        await clients.more(24)
        # Ray may prefer one of them for a while, so the one that works now is killed.
        before = {pid: cpu_ticks(pid) for pid in cluster.replicas("main-1")}
        await asyncio.sleep(0.5)
        survivor, victim = sorted(before, key=lambda pid: cpu_ticks(pid) - before[pid])
        os.kill(victim, signal.SIGKILL)
        await clients.more(16)
        took = await until(
            lambda: status().replicas == {"RUNNING": 2} and len(cluster.replicas("main-1")) == 2,
            "the replica is not replaced",
        )
        await clients.more(8)
    assert survivor in cluster.replicas("main-1")
    broken = sum(not answer.whole for answer in clients.answers)
    print(f"{len(clients.answers)} answers, {broken} broken off; replaced after {took:.0f} s")
    assert clients.lost() == []
    assert all(len(texts) == 1 for texts in clients.texts().values())
    again = retries(port)
    print(f"{again:g} requests without a token were sent again")
    assert again + broken > 0


async def test_replicas_follow_the_outstanding_tokens_and_a_wrong_one_gets_no_request(
    cluster: RayCluster,
    exports: Path,
    write: Callable[..., Path],
    port: int,
    status: Callable[[], Status],
    tmp_path: Path,
) -> None:
    """1 → 3 → 1; then the artifact is replaced by one with halved weight scales, and 1 stays 1."""
    artifact = tmp_path / "served"
    shutil.copytree(exports / "onnx", artifact)
    halve_onnx_scales(exports / "onnx", tmp_path / "halved")
    config = write(
        *("scaled", {"type": "embedded", "path": str(artifact), "threads": 1}),
        min_replicas=1,
        max_replicas=3,
        tokens_per_replica=60,
        upscale_delay_s=1.0,
        downscale_delay_s=5.0,
    )
    assert cluster.deploy(config).returncode == 0
    await until(lambda: status().replicas == {"RUNNING": 1}, "it is not one")
    async with Clients(url(port)) as clients:
        up = await until(lambda: status().replicas == {"RUNNING": 3}, "it is not three")
        await clients.more(24)
    down = await until(lambda: status().replicas == {"RUNNING": 1}, "it is not one again")
    print(f"1 to 3 after {up:.0f} s, 3 to 1 after {down:.0f} s, {len(clients.answers)} answers")
    assert clients.lost() == []
    assert all(answer.whole for answer in clients.answers)
    right = clients.texts()

    shutil.move(artifact, tmp_path / "right")
    shutil.move(tmp_path / "halved", artifact)
    first = await only_replica(cluster)
    before = cluster.logs().count("is refused: ")
    async with Clients(url(port)) as clients:
        await until(lambda: cluster.logs().count("is refused: ") >= before + 2, "none is refused")
        await clients.more(24)
        reason = "OctetError: main/main-1 is refused: "
        await until(lambda: reason in status().message, "Ray does not say why")
        assert status().replicas["RUNNING"] == 1
        assert first in cluster.replicas("main-1")
    assert clients.lost() == []
    assert all(texts <= right[prompt] for prompt, texts in clients.texts().items())
    print(f"{len(clients.answers)} answers of the proven replica while others were refused")


async def test_an_artifact_that_is_refused_is_not_deployed(
    cluster: RayCluster, exports: Path, write: Callable[..., Path], tmp_path: Path
) -> None:
    halve_onnx_scales(exports / "onnx", tmp_path / "halved")
    backend = {"type": "embedded", "path": str(tmp_path / "halved"), "threads": 1}
    done = cluster.deploy(write("refused", backend))
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: not deployed: main/main-1 is refused: ")


async def test_a_replica_may_be_a_vllm(
    cluster: RayCluster, exports: Path, write: Callable[..., Path], port: int
) -> None:
    require(layout.VLLM)
    if "avx512f" not in cpu_flags():
        pytest.skip("vLLM's CPU build keeps an FP8 KV cache only with AVX-512: use such a machine")
    server = VllmServer(model=exports / "checkpoint", log=Path(), threads=1)
    backend = {
        "type": "vllm",
        "artifact": str(exports / "checkpoint"),
        "python": str(layout.python(layout.VLLM)),
        "options": ["--enforce-eager", "--max-model-len", "1024"],
        "environment": server.environment(),
    }
    done = cluster.deploy(write("vllm", backend, gpus=0, cpus=0.5))
    assert done.returncode == 0, done.stderr
    entry = ready(port)["models"][MODEL][0]
    assert (entry["standing"], entry["proof"]) == ("in", "proven")
    async with Clients(url(port), workers=2) as clients:
        await clients.more(6)
    assert clients.lost() == []
    replica = await only_replica(cluster)
    vllm = []
    for path in Path(f"/proc/{replica}/task").glob("*/children"):
        with suppress(OSError):  # a thread may end meanwhile
            vllm += [int(pid) for pid in path.read_text().split()]
    assert vllm
    os.kill(replica, signal.SIGKILL)  # takes its vLLM with it
    await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in vllm), "vLLM is left")


def test_mistakes_are_one_line_each(
    cluster: RayCluster, exports: Path, write: Callable[..., Path], tmp_path: Path
) -> None:
    backend = {"type": "embedded", "path": str(exports / "onnx")}
    greedy = cluster.deploy(write("greedy", backend, gpus=2))
    assert greedy.returncode == 2
    assert greedy.stderr.splitlines()[-1] == (
        "error: main-1: a replica needs 0.2 CPU, 2 GPU on one machine, and a machine of the cluster"
        " has at most 4 CPU, 0 GPU: lower it under `ray`, or add a machine"
    )
    many = cluster.deploy(write("many", backend, min_replicas=30, max_replicas=30))
    assert "the fewest replicas need 6.2 CPU, and the cluster has 4 CPU" in many.stderr
    config = str(write("other", backend))
    words = ["deploy", "ray", config, "--address", cluster.address]
    other = run([str(layout.python(layout.RAY)), "-P", "-c", OTHER, *words])
    assert other.returncode == 2
    assert other.stderr.splitlines()[-1].startswith(
        "error: the Ray cluster is of another version: install the same here and there (The cluster"
    )
    absent = octet("deploy", "ray", str(write("absent", backend)), "--address", "127.0.0.1:1")
    assert absent.returncode == 2
    assert "no Ray cluster answers at 127.0.0.1:1 (" in absent.stderr.splitlines()[-1]
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        words = ["deploy", "ray", config, "--address", f"127.0.0.1:{server.server_port}"]
        foreign = octet(*words)
        server.shutdown()
    assert foreign.returncode == 2
    assert "(what listens there is no Ray): start one" in foreign.stderr.splitlines()[-1]
