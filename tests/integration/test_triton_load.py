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

from export.triton.write import export_triton
from octet.recipe import Recipe
from serve.backends.embedded import EmbeddedBackend
from tests.export.conftest import make_calibration
from tests.integration.conftest import require
from tests.integration.servers import layout
from tests.integration.servers.launch import ServerFailed, TritonServer
from tests.integration.test_servers import is_stub, processes_of_group
from tests.integration.triton_client import Refused, counters, pieces, text_request
from tests.serve.contract import ask, collect

pytestmark = pytest.mark.triton

NAME = "python-lm"
REQUESTS, AT_ONCE = 200, 24  # more at once than the 16 slots
SLOTS = 16
TEXT = (Path(__file__).parent / "test_servers.py").read_text()
LEAK_KB = 20 * REQUESTS  # in a round: 20 kB a request


@dataclass(frozen=True)
class Case:
    prompt: str
    max_tokens: int
    stream: bool
    cancel_after: int | None  # pieces; 0 cancels before the first
    bad: bool = False  # it has no tokens to make, and is refused


def cases(count: int, seed: int = 2) -> list[Case]:
    """A third not streamed, a fifth cancelled (some of either sort), a tenth bad, sizes mixed."""
    draw = random.Random(seed)
    made = []
    for index in range(count):
        start, length = draw.randrange(2000), draw.choice((1, 20, 200, 1200))
        stream = index % 3 != 0
        cancelled, bad = index % 5 == 0, index % 10 == 1
        after = draw.choice((0, 1, 3)) if stream else 0
        tokens = draw.choice((1, 4, 16, 48)) if not cancelled else 300
        text = TEXT[start : start + length]
        made.append(Case(text, 0 if bad else tokens, stream, after if cancelled else None, bad))
    return made


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory, example_model: Path) -> Path:
    require(layout.TRITON)
    root = tmp_path_factory.mktemp("load")
    model = shutil.copytree(example_model, root / "model")
    # Triton's stub takes text files for ASCII, unless they are read as what they are.
    (model / "chat_template.jinja").write_text("« {{ messages[0].content }} »", encoding="utf-8")
    calibration = make_calibration(root / "calibration", model, Recipe.load("fp8"))
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
    """The answer; None if it was cancelled or refused, which is what the case says."""
    message = text_request(
        NAME,
        case.prompt,
        stream=case.stream,
        max_tokens=case.max_tokens,
        temperature=0,
        ignore_eos=True,
    )
    if case.bad:
        with pytest.raises(Refused, match="max_tokens"):
            await anext(pieces(stub, message))
        return None
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
    (pid,) = filter(is_stub, processes_of_group(server.process.pid))
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    return {"kB": int(status["VmRSS"].split()[0]), "threads": int(status["Threads"])}


def shared_memory(server: TritonServer) -> int:
    segments = Path("/dev/shm").glob(f"{server.shared_memory}*")
    return sum(path.stat().st_size for path in segments)


async def until(condition: Callable[[], bool], seconds: float = 60) -> None:
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
    of = cases(REQUESTS)
    started = time.monotonic()
    answers = await run_all(stub, of)
    elapsed_s = time.monotonic() - started
    await check(of, answers, entry)
    shared = shared_memory(server)
    # ONNX Runtime's arena grows to what the largest batch takes, which is a matter of chance: so
    # again, until a round adds nothing. What leaks, leaks in every round.
    rounds = [stub_process(server)]
    for _ in range(5):
        seen = counters(server, NAME)
        await run_all(stub, of)
        await until(lambda: counters(server, NAME)["nv_inference_pending_request_count"] == 0)
        rounds.append(stub_process(server))
        if rounds[-1]["kB"] - rounds[-2]["kB"] < LEAK_KB:
            break
    memory = [f"{sizes['kB'] / 1024:.1f}" for sizes in rounds]
    now = counters(server, NAME)
    answered, failed = (
        now[name] - seen[name]
        for name in ("nv_inference_request_success", "nv_inference_request_failure")
    )
    cancelled, bad = sum(case.cancel_after is not None for case in of), sum(c.bad for c in of)
    print(
        f"\n{REQUESTS} requests, {cancelled} cancelled, {bad} bad, {AT_ONCE} at once:"
        f" {elapsed_s:.1f} s; memory after each round {', '.join(memory)} MiB, threads"
        f" {rounds[0]['threads']} -> {rounds[-1]['threads']}; counted {answered:.0f} answered,"
        f" {failed:.0f} failed"
    )
    # What is cancelled on its way is not counted.
    assert REQUESTS - cancelled - bad <= answered <= answered + failed <= REQUESTS
    assert rounds[-1]["threads"] == rounds[0]["threads"]
    assert rounds[-1]["kB"] - rounds[-2]["kB"] < LEAK_KB
    assert shared_memory(server) == shared


async def check(of: list[Case], answers: list[str | None], entry: Path) -> None:
    """Each answer is the embedded engine's, alone in this process."""
    embedded = EmbeddedBackend(entry / "1" / "onnx")
    await embedded.start()
    try:
        for case, answer in zip(of, answers, strict=True):
            assert (answer is None) == (case.bad or case.cancel_after is not None)
            if answer is not None:
                request = ask(embedded, case.prompt, max_tokens=case.max_tokens)
                assert answer == (await collect(embedded, request))[0], case
    finally:
        await embedded.close()


@pytest.mark.parametrize("more", [0, 1])
async def test_every_slot_is_free_afterwards(stub: Stub, more: int) -> None:
    """As many answers as there are slots begin together; one more waits until another ends."""
    for _ in range(5):  # a machine that is busy with others may hold up some of them
        waited = await last_begins(stub, SLOTS + more)
        if waited > 0.6 if more else waited < 0.4:
            break
    print(f"\n{SLOTS + more} at once: the last begins after {waited:.0%} of the first answer")
    assert waited > 0.6 if more else waited < 0.4


async def last_begins(stub: Stub, count: int) -> float:
    """When the last of `count` answers begins; 0 is when they are asked for, 1 the first's end."""
    begun, ended = [], []

    async def one(index: int) -> None:
        text = TEXT[index : index + 40]
        message = text_request(
            NAME, text, stream=True, max_tokens=100, temperature=0, ignore_eos=True
        )
        first = True
        async for _ in pieces(stub, message):
            if first:
                begun.append(time.monotonic())
            first = False
        ended.append(time.monotonic())

    started = time.monotonic()
    await asyncio.gather(*map(one, range(count)))
    return (max(begun) - started) / (min(ended) - started)
