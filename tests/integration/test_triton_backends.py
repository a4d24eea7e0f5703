"""Every entry on a real Triton, as far as that goes without NVIDIA's backends.

The wheel's tritonserver has the Python backend alone. So each configuration is read and checked
until Triton looks for the backend; and then, with a stand-in of tests/integration/triton_backends
where the backend would be, loaded, warmed up and asked. Triton itself (its parser, its checks of
shapes and types, its batcher, its scheduler) is the real one throughout.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub as Stub
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from export.triton.write import export_all
from octet.recipe import Recipe
from serve.engine.tokenizer import Tokenizer
from tests.export.conftest import make_calibration
from tests.export.runner import OnnxModel
from tests.export.triton.test_write_engines import make_engine
from tests.integration.conftest import require
from tests.integration.servers import layout
from tests.integration.servers.launch import TritonServer
from tests.integration.triton_client import counters, load_model, pieces, text_request

pytestmark = pytest.mark.triton

STAND_INS = Path(__file__).parent / "triton_backends"
NO_BACKEND = "unable to find backend library for backend '{}'"
# What a server says of each entry that has no backend there.
WITHOUT = {
    "lm-onnxruntime": NO_BACKEND.format("onnxruntime"),
    "lm-tensorrt": NO_BACKEND.format("tensorrt"),
    "lm-vllm": "Triton's vLLM backend is not installed: there is no",
}
# Of an entry: what is replaced in its config.pbtxt, by what, and what Triton then says or logs.
BROKEN: dict[str, tuple[str, str, str, str]] = {
    "a field that is none": (
        *("lm-onnxruntime", "max_batch_size: 16", "max_batchsize: 16"),
        'has no field named "max_batchsize"',
    ),
    "a type that Triton lacks": (
        *(
            "lm-onnxruntime",
            '0.value" data_type: TYPE_FP16 dims',
            '0.value" data_type: TYPE_FP8 dims',
        ),
        'Unknown enumeration value of "TYPE_FP8"',
    ),
    "a dimension of 0": (
        *("lm-onnxruntime", "dims: [ 1, -1, -1 ]", "dims: [ 1, 0, -1 ]"),
        "dimension must be integer >= 1, or -1",
    ),
    "another model's name": (
        *("lm-tensorrt", 'name: "lm-tensorrt"', 'name: "other"'),
        "directory name must equal model name",
    ),
    "a backend that is not the platform's": (
        *(
            "lm-tensorrt",
            'platform: "tensorrt_plan"',
            'platform: "tensorrt_plan" backend: "onnxruntime"',
        ),
        "unexpected 'platform' and 'backend' pair",
    ),
    "a preferred batch above the largest": (
        *("lm-onnxruntime", "dynamic_batching {", "dynamic_batching { preferred_batch_size: 17"),
        "dynamic batching preferred size must be <= max batch size",
    ),
    "a response cache of a decoupled model": (
        *("lm-vllm", "max_batch_size: 0", "max_batch_size: 0 response_cache { enable: true }"),
        "Response Cache does not currently support model",
    ),
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, example_model: Path) -> Path:
    """Every entry but the one that runs TensorRT in this process: that needs TensorRT and a GPU."""
    require(layout.TRITON)
    root = tmp_path_factory.mktemp("entries")
    recipe = Recipe.load("fp8-static")
    calibration = make_calibration(root / "calibration", example_model, recipe)
    engine = make_engine(root / "engine", calibration, batch=16)
    written = export_all(calibration, root / "models", engine=engine, name="lm")
    assert not written.left_out
    shutil.rmtree(root / "models" / "lm-engine")
    return root / "models"


@pytest.fixture(scope="module")
def bare(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server without the backends; I/O is checked before they are looked for."""
    root = tmp_path_factory.mktemp("bare")
    shutil.copytree(repository, root / "models")
    for index, (entry, old, new, _) in enumerate(BROKEN.values()):
        broken = root / "models" / f"broken-{index}"
        shutil.copytree(repository / entry, broken)
        text = (broken / "config.pbtxt").read_text()
        assert old in text, (entry, old)
        text = text.replace(old, new, 1).replace(f'name: "{entry}"', f'name: "{broken.name}"')
        (broken / "config.pbtxt").write_text(text)
    with TritonServer(
        model_repository=root / "models",
        log=root / "log",
        control="explicit",
        options=("--disable-auto-complete-config",),
    ) as server:
        yield server


@pytest.mark.parametrize(("entry", "words"), WITHOUT.items(), ids=WITHOUT.keys())
def test_an_entry_is_accepted_until_its_backend_is_looked_for(
    bare: TritonServer, entry: str, words: str
) -> None:
    assert words in load_model(bare, entry)


def test_the_python_entry_needs_nothing_else(bare: TritonServer) -> None:
    assert load_model(bare, "lm") == ""


@pytest.mark.parametrize("why", BROKEN)
def test_a_broken_configuration_is_refused_for_what_is_wrong(bare: TritonServer, why: str) -> None:
    """Before any backend is looked for: so an entry that gets that far has a good configuration."""
    name = f"broken-{list(BROKEN).index(why)}"
    start = bare.log.stat().st_size
    said = load_model(bare, name)
    logged = bare.log.read_bytes()[start:].decode(errors="replace")
    assert BROKEN[why][3] in said + logged
    assert "unable to find backend" not in said and "not installed" not in said


@pytest.fixture(scope="module")
def complete(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server with stand-ins for the backends, started elsewhere, on a repository that was moved.

    Paths on its command line are relative, as a user may write them.
    """
    root = tmp_path_factory.mktemp("complete")
    shutil.copytree(repository, root / "moved")
    shutil.copytree(STAND_INS, root / "backends")
    shutil.copytree(layout.TRITON_BACKENDS / "python", root / "backends" / "python")
    config = root / "moved" / "lm-tensorrt" / "config.pbtxt"
    text = config.read_text()  # this machine has no GPU to name
    config.write_text(text.replace("kind: KIND_GPU", "kind: KIND_CPU"))
    (root / "cwd").mkdir()
    with TritonServer(
        model_repository=Path("../moved"), backends=Path("../backends"), log=root / "cwd" / "log"
    ) as server:
        yield server


async def test_vllm_finds_its_checkpoint_wherever_triton_was_started(
    complete: TritonServer,
) -> None:
    message = text_request("lm-vllm", "def f", stream=False, max_tokens=3)
    del message.inputs[3]  # not among the stand-in's
    async with grpc.aio.insecure_channel(complete.grpc_address) as channel:
        (said,) = [piece async for piece in pieces(Stub(channel), message)]
    text, sampling, quantization, cache, where = json.loads(said)
    assert (text, sampling) == ("def f", {"max_tokens": 3})
    assert (quantization, cache) == ("compressed-tensors", "fp8_e5m2")
    assert where.endswith("/moved/lm-vllm/1") and where != str(complete.log.parent)


Step = Callable[..., dict[str, np.ndarray]]


@pytest.fixture
def step(complete: TritonServer) -> Iterator[Step]:
    """`step(model, inputs)`: one request of named arrays, answered by named arrays."""
    with triton_grpc.InferenceServerClient(complete.grpc_address) as client:

        def run(model: str, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            tensors = []
            for name, array in inputs.items():
                tensor = triton_grpc.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
                tensors.append(tensor.set_data_from_numpy(np.ascontiguousarray(array)))
            result = client.infer(model, tensors)
            outputs = [output.name for output in result.get_response().outputs]
            return {name: result.as_numpy(name) for name in outputs}

        yield run


class Loop:
    """Somebody's own decode loop over one sequence; a cache in a window of `slots`."""

    def __init__(self, step: Step, shapes: OnnxModel, slots: int = 64) -> None:
        self.step, self.shapes, self.slots, self.length = step, shapes, slots, 0
        self.past = shapes.empty(1, slots)

    def forward(self, ids: list[int]) -> int:
        """Reads `ids` [T]; returns the most likely next token."""
        count = len(ids)
        mask = np.zeros((1, 1, count, self.slots + count), bool)
        mask[..., : self.length] = True
        mask[..., self.slots :] = np.tri(count, dtype=bool)
        inputs = {
            "input_ids": np.array([ids], np.int64),
            "position_ids": np.arange(self.length, self.length + count)[None],
            "attention_mask": mask,
            "logit_positions": np.array([[count - 1]]),
            **dict(zip(self.shapes.pasts, self.past, strict=True)),
        }
        outputs = self.step("lm-onnxruntime", inputs)
        for past, name in zip(self.past, self.shapes.presents, strict=True):
            past[:, :, self.length : self.length + count] = outputs[name]
        self.length += count
        return int(outputs["logits"][0, -1].argmax())

    def generate(self, prompt: list[int], count: int) -> list[int]:
        tokens = [self.forward(prompt)]
        while len(tokens) < count:
            tokens.append(self.forward(tokens[-1:]))
        return tokens


def test_an_own_loop_over_the_onnxruntime_entry_gives_the_tokens_of_the_graph(
    complete: TritonServer, repository: Path, step: Step
) -> None:
    """Alone, and when Triton joins the steps of several."""
    exported = repository / "lm-onnxruntime" / "1"
    graph = OnnxModel(exported)

    def directly(_: str, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        names = [output.name for output in graph.session.get_outputs()]
        return dict(zip(names, graph.session.run(names, inputs), strict=True))

    tokenizer = Tokenizer.load(exported)
    prompts = [
        tokenizer.encode(text) for text in ("def add(a, b):", "import os, sys", "class A:\n")
    ]
    expected = [Loop(directly, graph).generate(list(prompt), 16) for prompt in prompts]
    alone = [Loop(step, graph).generate(list(prompt), 16) for prompt in prompts]
    assert alone == expected
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(
            pool.map(lambda prompt: Loop(step, graph).generate(list(prompt), 16), prompts)
        )
    assert together == expected
    seen = counters(complete, "lm-onnxruntime")
    runs, steps = seen["nv_inference_exec_count"], seen["nv_inference_count"]
    print(f"\n{steps:.0f} steps in {runs:.0f} runs")
    assert runs < steps


def test_the_onnxruntime_entry_refuses_another_type(step: Step, repository: Path) -> None:
    graph = OnnxModel(repository / "lm-onnxruntime" / "1")
    loop = Loop(step, graph)
    loop.past = [past.astype(np.float32) for past in loop.past]
    with pytest.raises(InferenceServerException, match=r"data-type is 'FP32', .* expects 'FP16'"):
        loop.forward([1])


@pytest.mark.parametrize(
    ("batch", "tokens", "slots"), [(1, 16, 64), (16, 1, 128), (1, 5, 0)], ids=str
)
def test_the_tensorrt_entry_takes_the_shapes_of_both_profiles(
    step: Step, repository: Path, batch: int, tokens: int, slots: int
) -> None:
    graph = OnnxModel(repository / "lm-onnxruntime" / "1")
    cache = np.zeros((batch, graph.heads, slots, graph.head_dim), np.uint8)
    outputs = step(
        "lm-tensorrt",
        {
            "input_ids": np.zeros((batch, tokens), np.int64),
            "position_ids": np.zeros((batch, tokens), np.int64),
            "attention_mask": np.ones((batch, 1, tokens, slots + tokens), bool),
            "logit_positions": np.zeros((batch, 1), np.int64),
            **dict.fromkeys(graph.pasts, cache),
        },
    )
    rows = (batch, graph.heads, tokens, graph.head_dim)
    assert outputs["logits"].shape == (batch, 1, 4096) and outputs["logits"].dtype == np.float32
    for name in graph.presents:
        assert outputs[name].shape == rows and outputs[name].dtype == np.float16
