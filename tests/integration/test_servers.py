"""Tests what the backends rely on, on real servers: how they start, stream, fail and stop."""

import asyncio
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub as Stub

from tests.integration.servers.launch import ServerFailed, TritonServer, VllmServer

REPOSITORY = Path(__file__).parent / "toy_repository"


def processes_of_group(group: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getpgid(int(entry.name)) == group:
                    found.append(int(entry.name))
            except ProcessLookupError:
                continue
    return found


def is_stub(pid: int) -> bool:
    """Returns whether the process runs a Python model for Triton; it may have ended."""
    try:
        return b"triton_python_backend_stub" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def request(text: str, max_tokens: int = 3) -> service_pb2.ModelInferRequest:
    message = service_pb2.ModelInferRequest(model_name="count", id="a request")
    for name, value in (("text_input", text), ("sampling_parameters", {"max_tokens": max_tokens})):
        tensor = message.inputs.add(name=name, datatype="BYTES", shape=[1])
        encoded = value if isinstance(value, str) else json.dumps(value)
        tensor.contents.bytes_contents.append(encoded.encode())
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    return message


def text_and_final(message: service_pb2.ModelStreamInferResponse) -> tuple[str | None, bool]:
    """The text of a response (None if it has no tensors) and whether it is the last."""
    response = message.infer_response
    final = response.parameters["triton_final_response"].bool_param
    if not response.raw_output_contents:
        return None, final
    (content,) = response.raw_output_contents  # one BYTES element: uint32 length, then the bytes
    (length,) = struct.unpack_from("<I", content)
    assert len(content) == 4 + length
    return content[4:].decode(), final


@pytest.fixture
async def stub(
    start_triton: Callable[[Path], TritonServer],
) -> AsyncIterator[Stub]:
    async with grpc.aio.insecure_channel(start_triton(REPOSITORY).grpc_address) as channel:
        yield Stub(channel)


async def stream(
    stub: Stub, message: service_pb2.ModelInferRequest
) -> list[tuple[str | None, bool]]:
    call = stub.ModelStreamInfer()
    await call.write(message)
    await call.done_writing()
    return [text_and_final(answer) async for answer in call]


async def test_triton_streams_text_and_marks_the_end(stub: Stub) -> None:
    expected = [("0 é", False), ("1 é", False), ("2 é", False), (None, True)]
    assert await stream(stub, request("count")) == expected


async def test_triton_tells_of_a_bad_request_in_the_stream(stub: Stub) -> None:
    """Without a status. The header `triton_grpc_error` asks for one, and crashes Triton 2.51."""
    call = stub.ModelStreamInfer()
    await call.write(request("count", max_tokens=0))
    await call.done_writing()
    (answer,) = [answer async for answer in call]
    assert answer.error_message == "max_tokens must be positive"
    assert await stream(stub, request("count")) == await stream(stub, request("count"))


async def test_triton_model_learns_of_a_cancellation(stub: Stub) -> None:
    ((before, _),) = await stream(stub, request("cancellations"))
    call = stub.ModelStreamInfer()
    await call.write(request("count", max_tokens=500))
    await call.done_writing()
    await call.read()
    call.cancel()
    for _ in range(1000):
        ((after, _),) = await stream(stub, request("cancellations"))
        if after != before:
            break
        await asyncio.sleep(0.05)
    assert int(after or 0) == int(before or 0) + 1


@pytest.mark.triton
def test_stopping_leaves_no_process(
    tmp_path: Path, start_triton: Callable[[Path], TritonServer]
) -> None:
    with TritonServer(model_repository=REPOSITORY, log=tmp_path / "log") as server:
        assert server.process is not None
        group = server.process.pid
        assert len(processes_of_group(group)) > 2  # the server, its stub and the guard
    deadline = time.monotonic() + 60  # whom the kernel has killed is gone a moment later
    while processes_of_group(group) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert processes_of_group(group) == []


RUN = """
import sys, time
from pathlib import Path
from tests.integration.servers.process import Server, free_port

PORT = str(free_port())

class Simple(Server):
    ready_url = f"http://127.0.0.1:{PORT}/"

    def command(self):
        return [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", PORT]

    def environment(self):
        return {}

with Simple(log=Path(sys.argv[1])) as server:
    print(server.process.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_a_run_that_is_killed_leaves_no_server(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN, str(tmp_path / "log")]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    group = int(run.stdout.readline())
    assert processes_of_group(group)
    run.send_signal(number)
    run.communicate()
    deadline = time.monotonic() + 60
    while processes_of_group(group) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert processes_of_group(group) == []


def test_triton_that_cannot_load_a_model_says_why(
    tmp_path: Path, start_triton: Callable[[Path], TritonServer]
) -> None:
    model = tmp_path / "models" / "broken"
    (model / "1").mkdir(parents=True)
    (model / "1" / "model.py").write_text("raise RuntimeError('weights are missing')\n")
    (model / "config.pbtxt").write_text('name: "broken"\nbackend: "python"\n')
    with pytest.raises(ServerFailed, match="weights are missing"):
        start_triton(tmp_path / "models")


def test_vllm_without_a_checkpoint_says_why(
    tmp_path: Path, start_vllm: Callable[..., VllmServer]
) -> None:
    with pytest.raises(ServerFailed, match="ended with code 1"):
        start_vllm(tmp_path)
