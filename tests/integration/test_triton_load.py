"""The Python entry on a real Triton under load: 200 requests of every sort leave nothing behind."""

import asyncio
import random
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub as Stub

from export.triton import export_triton
from octet.recipe import Recipe
from serve.backends.embedded import EmbeddedBackend
from tests.export.conftest import make_calibration
from tests.integration.conftest import require
from tests.integration.servers import layout
from tests.integration.servers.launch import ServerFailed, TritonServer
from tests.integration.test_servers import processes_of_group
from tests.integration.triton_client import counters, pieces, text_request
from tests.serve.contract import ask, collect

pytestmark = pytest.mark.triton

NAME = "python-lm"
REQUESTS, AT_ONCE = 200, 24  # more at once than the 16 slots
SLOTS = 16
TEXT = (Path(__file__).parent / "test_servers.py").read_text()
GROWTH_MB = 24  # of the stub's memory over 200 requests; it holds some 150


@dataclass(frozen=True)
class Case:
    prompt: str
    max_tokens: int
    stream: bool
    cancel_after: int | None  # pieces; 0 cancels before the first


def cases(count: int, seed: int) -> list[Case]:
    """A third of them not streamed, a fifth cancelled (some of either sort), sizes mixed."""
    draw = random.Random(seed)
    made = []
    for index in range(count):
        start, length = draw.randrange(2000), draw.choice((1, 20, 200, 1200))
        stream = index % 3 != 0
        cancelled = index % 5 == 0
        after = draw.choice((0, 1, 3)) if stream else 0
        tokens = draw.choice((1, 4, 16, 48)) if not cancelled else 300
        text = TEXT[start : start + length]
        made.append(Case(text, tokens, stream, after if cancelled else None))
    return made


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory, example_model: Path) -> Path:
    require(layout.TRITON)
    root = tmp_path_factory.mktemp("load")
    calibration = make_calibration(root / "calibration", example_model, Recipe.load("fp8"))
    export_triton(calibration, root / "models" / NAME)
    return root / "models" / NAME


@pytest.fixture(scope="module")
def server(entry: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    log = tmp_path_factory.mktemp("log") / "triton.log"
    with TritonServer(
        model_repository=entry.parent, log=log, options=("--log-verbose=1",)
    ) as running:
        yield running


@pytest.fixture
async def stub(server: TritonServer) -> AsyncIterator[Stub]:
    async with grpc.aio.insecure_channel(server.grpc_address) as channel:
        yield Stub(channel)


async def run(stub: Stub, case: Case) -> str | None:
    """The answer; None if it was cancelled, which is what the case says."""
    message = text_request(
        NAME,
        case.prompt,
        stream=case.stream,
        max_tokens=case.max_tokens,
        temperature=0,
        ignore_eos=True,
    )
    if case.cancel_after is None:
        return "".join([piece async for piece in pieces(stub, message)])
    if case.cancel_after == 0:
        first = asyncio.ensure_future(anext(pieces(stub, message)))
        await asyncio.sleep(0.02)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        return None
    async with aclosing(pieces(stub, message)) as stream:
        for _ in range(case.cancel_after):
            await anext(stream)
    return None


async def run_all(stub: Stub, of: list[Case]) -> list[str | None]:
    turn = asyncio.Semaphore(AT_ONCE)

    async def one(case: Case) -> str | None:
        async with turn:
            return await run(stub, case)

    return await asyncio.gather(*map(one, of))


def stub_process(server: TritonServer) -> dict[str, int]:
    """Resident memory (kB) and threads of the process that runs the model."""
    assert server.process is not None
    (pid,) = set(processes_of_group(server.process.pid)) - {server.process.pid}
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    return {"kB": int(status["VmRSS"].split()[0]), "threads": int(status["Threads"])}


def shared_memory(server: TritonServer) -> int:
    segments = Path("/dev/shm").glob(f"{server.shared_memory}*")
    return sum(path.stat().st_size for path in segments)


async def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    assert condition()


def test_it_was_warmed_up_before_it_was_ready(server: TritonServer) -> None:
    lines = server.log.read_text().splitlines()
    (warm,) = [i for i, line in enumerate(lines) if "is running warmup sample" in line]
    assert "'a short answer'" in lines[warm]
    (ready,) = [i for i, line in enumerate(lines) if f"successfully loaded '{NAME}'" in line]
    assert warm < ready


def test_an_entry_that_cannot_answer_its_warm_up_is_not_ready(entry: Path, tmp_path: Path) -> None:
    """Triton 2.51 says so, and may crash while it takes the model down again."""
    shutil.copytree(entry, tmp_path / "models" / NAME)
    (tmp_path / "models" / NAME / "warmup" / "sampling_parameters").write_bytes(b"\2\0\0\0{x")
    server = TritonServer(
        model_repository=tmp_path / "models", log=tmp_path / "log", options=("--log-verbose=1",)
    )
    with pytest.raises(ServerFailed, match="ended with code"):
        server.start()
    assert "failed to run warmup sample 'a short answer'" in server.log.read_text()


async def test_200_requests_of_every_sort_leave_nothing_behind(
    server: TritonServer, stub: Stub, entry: Path
) -> None:
    await run_all(stub, cases(60, seed=1))  # allocators and shared memory reach their size
    before, shared, seen = stub_process(server), shared_memory(server), counters(server, NAME)
    started = time.monotonic()
    of = cases(REQUESTS, seed=2)
    answers = await run_all(stub, of)
    elapsed_s = time.monotonic() - started

    embedded = EmbeddedBackend(entry / "1" / "onnx")
    await embedded.start()
    try:
        for case, answer in zip(of, answers, strict=True):
            assert (answer is None) == (case.cancel_after is not None)
            if answer is not None:
                expected, _ = await collect(
                    embedded, ask(embedded, case.prompt, max_tokens=case.max_tokens)
                )
                assert answer == expected, case
    finally:
        await embedded.close()

    await until(lambda: counters(server, NAME)["nv_inference_pending_request_count"] == 0)
    after = stub_process(server)
    now = counters(server, NAME)
    ended = {
        kind: now[name] - seen[name]
        for kind, name in (
            ("answered", "nv_inference_request_success"),
            ("failed", "nv_inference_request_failure"),
        )
    }
    cancelled = sum(case.cancel_after is not None for case in of)
    print(
        f"\n{REQUESTS} requests, {cancelled} cancelled, {AT_ONCE} at once: {elapsed_s:.1f} s;"
        f" memory {before['kB'] / 1024:.0f} -> {after['kB'] / 1024:.0f} MiB, threads"
        f" {before['threads']} -> {after['threads']}, shared {shared >> 20} ->"
        f" {shared_memory(server) >> 20} MiB; {ended}"
    )
    assert ended["answered"] + ended["failed"] == REQUESTS
    assert ended["answered"] >= REQUESTS - cancelled
    assert after["threads"] == before["threads"]
    assert after["kB"] - before["kB"] < GROWTH_MB * 1024
    assert shared_memory(server) == shared


@pytest.mark.parametrize("at_once", [SLOTS, SLOTS + 1])
async def test_every_slot_is_free_afterwards(stub: Stub, at_once: int) -> None:
    """As many as there are slots begin before one of them ends; of one more, one has to wait."""
    begun = 0
    at_end: list[int] = []  # how many had begun when each ended

    async def one(index: int) -> None:
        nonlocal begun
        text = TEXT[index : index + 40]
        message = text_request(
            NAME, text, stream=True, max_tokens=100, temperature=0, ignore_eos=True
        )
        first = True
        async for _ in pieces(stub, message):
            begun += first
            first = False
        at_end.append(begun)

    await asyncio.gather(*map(one, range(at_once)))
    assert at_end[0] == SLOTS and at_end[-1] == at_once
