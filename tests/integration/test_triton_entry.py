"""The exported Python entry on a real Triton, beside the embedded engine in this process."""

import asyncio
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from export.triton.write import export_triton
from octet.recipe import Recipe
from serve.backends.base import Backend
from serve.backends.embedded import EmbeddedBackend
from serve.backends.triton_grpc import TritonBackend
from serve.engine.request import Delta, Finished
from serve.engine.tokenizer import Tokenizer
from tests.export.conftest import make_calibration
from tests.integration.conftest import require
from tests.integration.servers import layout
from tests.integration.servers.launch import TritonServer
from tests.serve.contract import CHECKS, WITH_LOGPROBS, Check, ask, collect
from tests.triton_config import triton_at

PROMPTS = (
    "def fibonacci(n):\n",
    "import os\nimport sys\n\n\ndef main():\n",
    'class Stack:\n    """A last-in, first-out stack."""\n\n    def __init__(self',
)
NAME, SMALL = "python-lm", "one-slot"


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory, example_model: Path) -> Path:
    """The example with its weights' absolute maxima: these numbers are not under test here."""
    path = tmp_path_factory.mktemp("calibration") / "fp8"
    return make_calibration(path, example_model, Recipe.load("fp8"))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, calibration: Path) -> Path:
    """The entry as exported, and a copy of it edited to have one slot."""
    repository = tmp_path_factory.mktemp("triton") / "models"
    export_triton(calibration, repository / NAME)
    shutil.copytree(repository / NAME, repository / SMALL)
    config = repository / SMALL / "config.pbtxt"
    text = config.read_text().replace(f'name: "{NAME}"', f'name: "{SMALL}"')
    config.write_text(text.replace('string_value: "16"', 'string_value: "1"'))
    assert (repository / NAME / "manifest.json").is_file()  # which Triton does not know
    return repository


@pytest.fixture
def server(start_triton: Callable[[Path], TritonServer], repository: Path) -> TritonServer:
    return start_triton(repository)


@pytest.fixture
async def triton(server: TritonServer) -> AsyncIterator[Backend]:
    backend = TritonBackend(NAME, triton_at(server.grpc_address))
    await backend.start()
    assert await backend.ready()
    yield backend
    await backend.close()


@pytest.fixture
async def embedded(repository: Path) -> AsyncIterator[Backend]:
    backend = EmbeddedBackend(repository / NAME / "1" / "onnx")
    await backend.start()
    yield backend
    await backend.close()


@pytest.fixture
def tokenizer(repository: Path) -> Tokenizer:
    return Tokenizer.load(repository / NAME / "1" / "onnx")


@pytest.mark.parametrize("check", (*CHECKS, *WITH_LOGPROBS), ids=lambda check: check.__name__)
async def test_what_a_backend_owes(check: Check, triton: Backend, tokenizer: Tokenizer) -> None:
    await check(triton, PROMPTS[0], tuple(tokenizer.encode(PROMPTS[0])))


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: prompt.split()[0])
async def test_answers_are_those_of_the_embedded_engine(
    prompt: str, triton: Backend, embedded: Backend
) -> None:
    fields: dict[str, Any] = {"max_tokens": 64, "ignore_eos": False, "logprobs": 5}
    text, events = await collect(triton, ask(triton, prompt, **fields))
    expected, expected_events = await collect(embedded, ask(embedded, prompt, **fields))
    print(f"\n{prompt}|{text}")
    assert text == expected
    assert events[-1] == expected_events[-1]  # reason, stop reason, token counts
    for found, wanted in zip(positions(events), positions(expected_events), strict=True):
        assert found.text_offset == wanted.text_offset
        tokens = zip((found.chosen, *found.top), (wanted.chosen, *wanted.top), strict=True)
        for token, other in tokens:
            assert (token.token_id, token.text, token.bytes) == (
                other.token_id,
                other.text,
                other.bytes,
            )
            assert token.logprob == pytest.approx(other.logprob, abs=1e-9)


def positions(events: list[Any]) -> list[Any]:
    return [p for event in events if isinstance(event, Delta) for p in event.logprobs or ()]


async def test_requests_beyond_the_slots_wait_their_turn(
    triton: Backend, embedded: Backend
) -> None:
    requests = [ask(triton, prompt[i:], max_tokens=16 + i) for prompt in PROMPTS for i in range(8)]
    answers = await asyncio.gather(*(collect(triton, request) for request in requests))
    alone = [await collect(embedded, request) for request in requests]
    assert [text for text, _ in answers] == [text for text, _ in alone]
    assert [events[-1] for _, events in answers] == [events[-1] for _, events in alone]


async def test_a_stop_string_is_the_reason(triton: Backend, embedded: Backend) -> None:
    request = ask(triton, PROMPTS[0], max_tokens=64, stop=("\n\n", " function"))
    text, events = await collect(triton, request)
    expected, expected_events = await collect(embedded, request)
    assert text == expected and events[-1] == expected_events[-1]
    assert isinstance(events[-1], Finished) and events[-1].stop_reason == " function"


async def test_a_cancelled_request_frees_its_slot(server: TritonServer) -> None:
    """The model has one slot: the next request starts when the one before has ended."""
    backend = TritonBackend(SMALL, triton_at(server.grpc_address))
    await backend.start()
    started = time.monotonic()
    await collect(backend, ask(backend, PROMPTS[0], max_tokens=900))
    whole_s = time.monotonic() - started
    async with AsyncExitStack() as stack:
        stack.push_async_callback(backend.close)
        for _ in range(5):  # the first that is soon: others use this machine too
            for _ in range(3):  # three in a row would take three times as long
                stream: Any = backend.generate(ask(backend, PROMPTS[0], max_tokens=900))
                await anext(stream)
                await stream.aclose()
            started = time.monotonic()
            text, _ = await collect(backend, ask(backend, PROMPTS[0], max_tokens=1))
            waited_s = time.monotonic() - started
            if waited_s < whole_s / 2:
                break
    print(f"\n900 tokens: {whole_s:.2f} s; after three cancelled ones: {waited_s:.2f} s")
    assert text and waited_s < whole_s / 2


@pytest.mark.parametrize(
    ("sampling", "param", "words"),
    [
        ({"tempratur": 0.5}, "tempratur", "did you mean 'temperature'?"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"max_tokens": 0}, "max_tokens", "greater than 0"),
        ("{", "sampling_parameters", "not valid JSON"),
    ],
    ids=lambda value: str(value)[:16],
)
async def test_bad_sampling_parameters_are_refused_with_their_name(
    server: TritonServer, sampling: Any, param: str, words: str
) -> None:
    encoded = sampling if isinstance(sampling, str) else json.dumps(sampling)
    message = service_pb2.ModelInferRequest(model_name=NAME)
    for name, value in (("text_input", "def f"), ("sampling_parameters", encoded)):
        tensor = message.inputs.add(name=name, datatype="BYTES", shape=[1])
        tensor.contents.bytes_contents.append(value.encode())
    async with grpc.aio.insecure_channel(server.grpc_address) as channel:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer()
        await call.write(message)
        await call.done_writing()
        refusal = json.loads((await call.read()).error_message)
    assert refusal["param"] == param and words in refusal["message"]


async def test_tritons_own_http_endpoints_need_no_tensors(
    server: TritonServer, embedded: Backend
) -> None:
    body = {"text_input": PROMPTS[0], "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    expected, _ = await collect(embedded, ask(embedded, PROMPTS[0]))
    (answer,) = await asyncio.to_thread(post, server, "generate", body)
    assert answer["text_output"] == PROMPTS[0] + expected  # as the vLLM backend: prompt included
    pieces = await asyncio.to_thread(post, server, "generate_stream", body | {"stream": True})
    assert "".join(piece["text_output"] for piece in pieces) == expected


def post(server: TritonServer, endpoint: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    url = f"http://127.0.0.1:{server.http_port}/v2/models/{NAME}/{endpoint}"
    with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=60) as response:
        lines = [line.removeprefix("data: ") for line in response.read().decode().splitlines()]
    return [json.loads(line) for line in lines if line]


@pytest.mark.vllm
def test_vllm_takes_the_engine_arguments(tmp_path: Path, calibration: Path) -> None:
    """As Triton's vLLM backend reads them: AsyncEngineArgs(**model.json), from their directory."""
    require(layout.VLLM)
    entry = tmp_path / "models" / "python-lm-vllm"
    export_triton(calibration, entry, backend="vllm")
    code = (
        "import json, sys; from vllm.engine.arg_utils import AsyncEngineArgs as Arguments;"
        "arguments = Arguments(**json.load(open(sys.argv[1])));"
        "model = arguments.create_model_config();"
        "print(model.quantization, model.max_model_len, arguments.kv_cache_dtype)"
    )
    done = subprocess.run(
        [str(layout.python(layout.VLLM)), "-P", "-c", code, "model.json"],
        cwd=entry / "1",
        env={"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "compressed-tensors 1024 fp8_e5m2"
