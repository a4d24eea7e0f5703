"""The vLLM plugin in a worker that has vLLM's methods; tests/integration/test_drift.py has vLLM."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import serve.vllm_counting.plugin as plugin
from octet.artifacts.live import read_live
from octet.artifacts.manifest import Manifest, software, write_artifact
from octet.artifacts.provenance import ModelIdentity
from octet.errors import ConfigError
from octet.model.checkpoint import Checkpoint
from octet.model.spec import ModelSpec
from octet.recipe import Recipe
from serve import vllm_counting

CALIBRATION = "c" * 64
PADDING = 3  # rows that vLLM adds to a step


class Layer(torch.nn.Module):
    """A module that gets what vLLM's gives its own, and computes nothing."""

    def forward(self, *given: torch.Tensor) -> None:
        pass


class Model(torch.nn.Module):
    """vLLM's names: q, k and v are one linear layer, gate and up another."""

    def __init__(self, spec: ModelSpec, prefix: str = "model") -> None:
        super().__init__()
        self.spec = spec
        self.skipped: frozenset[str] = frozenset()  # these are not computed
        names = []
        for index in range(spec.layers):
            block = f"{prefix}.layers.{index}"
            names += [f"{block}.self_attn.{x}" for x in ("qkv_proj", "attn", "o_proj")]
            names += [f"{block}.mlp.{x}" for x in ("gate_up_proj", "down_proj")]
        for name in names:
            at: torch.nn.Module = self
            *parents, last = name.split(".")
            for parent in parents:
                if parent not in dict(at.named_children()):
                    at.add_module(parent, torch.nn.Module())
                at = at.get_submodule(parent)
            at.add_module(last, Layer())
        self.names = names

    def forward(self, rows: int) -> None:
        spec = self.spec
        heads = spec.kv_heads * spec.head_dim
        for name in self.names:
            last = name.rpartition(".")[2]
            if last in self.skipped:
                continue
            widths = {"attn": (512, heads, heads), "down_proj": (512,)}.get(last, (256,))
            self.get_submodule(name)(*(torch.ones(rows, x).bfloat16() for x in widths))


class Operation:
    """One that vLLM writes as several kernels for its compiler, and has a kernel for."""

    def forward(self) -> str:
        return "several kernels"

    def forward_cuda(self) -> str:
        pytest.fail("vLLM raises an error here")


class WithKernel(Operation):
    def forward_cuda(self) -> str:
        return "a kernel"


class Vllm:
    """What the plugin knows of vLLM."""

    cuda = False
    compiles = True

    def __init__(self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
        self.operations = "for the compiler"  # what vLLM prefers
        self.replayed: list[str] = []  # the graph of each step that had one
        context = SimpleNamespace(batch_descriptor=None)

        class CUDAGraphWrapper:
            def __init__(self, runnable: Callable[[int], None]) -> None:
                self.runnable = runnable
                self.concrete_cudagraph_entries: dict[Any, str] = {}

            def __call__(wrapper, rows: int) -> None:
                graphs, key = wrapper.concrete_cudagraph_entries, context.batch_descriptor
                if key is None:
                    wrapper.runnable(rows)
                elif key in graphs:
                    self.replayed.append(graphs[key])
                else:  # a second set of graphs is that of the second capture
                    assert self.captures, "vLLM captures no graph while it serves"
                    graphs[key] = f"{key} tokens, capture {self.captures}"
                    wrapper.runnable(rows)

        run = CUDAGraphWrapper(model)
        self.captures = 0
        self.sizes: tuple[int, ...] = ()  # steps of so many tokens have a graph

        class Runner:
            def get_model(runner) -> Any:
                return model

            def capture_model(runner) -> int:
                self.captures += 1
                for context.batch_descriptor in self.sizes:
                    run(context.batch_descriptor + PADDING)
                context.batch_descriptor = None
                return 1

        class Worker:
            rank = 0
            device = torch.device("cpu")

            def __init__(worker, instance: str = "12ab3", replica: int = 0) -> None:
                worker.vllm_config = SimpleNamespace(
                    model_config=SimpleNamespace(model=str(checkpoint), enforce_eager=True),
                    parallel_config=SimpleNamespace(data_parallel_index=replica),
                    instance_id=instance,
                    compilation_config=SimpleNamespace(mode=int(self.compiles), backend="inductor"),
                )

            def load_model(worker) -> None:
                worker.model_runner = Runner()

            def execute_model(worker, scheduled: Any) -> str:
                tokens = scheduled.total_num_scheduled_tokens
                if scheduled.fails:
                    raise ValueError("out of memory")
                context.batch_descriptor = tokens if tokens in self.sizes else None
                run(tokens + PADDING)
                return "output"

        @contextmanager
        def set_priority() -> Iterator[None]:
            before, self.operations = self.operations, "eager"
            try:
                yield
            finally:
                self.operations = before

        def priority(config: Any) -> Any:
            assert not config.compilation_config.mode
            return SimpleNamespace(set_priority=set_priority)

        self.worker = Worker
        for name, module in {
            "vllm.compilation.cuda_graph": SimpleNamespace(CUDAGraphWrapper=CUDAGraphWrapper),
            "vllm.forward_context": SimpleNamespace(
                get_forward_context=lambda: context, is_forward_context_available=lambda: True
            ),
            "vllm.config": SimpleNamespace(CompilationMode=SimpleNamespace(NONE=0)),
            "vllm.model_executor.custom_op": SimpleNamespace(CustomOp=Operation),
            "vllm.platforms": SimpleNamespace(
                current_platform=SimpleNamespace(
                    is_cuda=lambda: self.cuda, get_default_ir_op_priority=priority
                )
            ),
            "vllm.v1.worker.gpu_model_runner": SimpleNamespace(GPUModelRunner=Runner),
            "vllm.v1.worker.gpu_worker": SimpleNamespace(Worker=Worker),
        }.items():
            monkeypatch.setitem(sys.modules, name, module)

    def start(self, graphs: tuple[int, ...] = (), **given: Any) -> Any:
        worker = self.worker(**given)
        worker.load_model()
        self.sizes = graphs
        if graphs:
            worker.model_runner.capture_model()
            self.captures = 0
        return worker


def step(worker: Any, tokens: int, fails: bool = False) -> Any:
    return worker.execute_model(SimpleNamespace(total_num_scheduled_tokens=tokens, fails=fails))


@pytest.fixture
def spec(tiny_model: Path) -> ModelSpec:
    return Checkpoint.open(tiny_model).spec


@pytest.fixture
def vllm(
    tiny_model: Path, spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Vllm]]:
    """vLLM with the plugin, which counts every step into `live`, in windows of 8 tokens."""
    with write_artifact(tmp_path / "checkpoint") as writer:
        identity = ModelIdentity.of(Checkpoint.open(tiny_model))
        writer.finish(
            Manifest(
                kind="checkpoint",
                calibration=CALIBRATION,
                model=identity,
                recipe=Recipe.load("fp8"),
                software=software(),
            )
        )
    monkeypatch.setattr(plugin, "_worker", None)
    monkeypatch.setenv("OCTET_COUNT", str(tmp_path / "live"))
    monkeypatch.setenv("OCTET_COUNT_ONE_STEP_IN", "1")
    monkeypatch.setenv("OCTET_COUNT_WINDOW_TOKENS", "8")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")  # set by `register`; undone afterwards

    def make(model: Any = None) -> Vllm:
        found = Vllm(tmp_path / "checkpoint", monkeypatch, model or Model(spec))
        vllm_counting.register()
        return found

    yield make


def read(directory: Path, spec: ModelSpec) -> list[Any]:
    """Reads the windows as of a calibration that observed inputs, keys and values."""
    if plugin._worker is not None:
        plugin._worker.live.close()
    names = [linear.input for linear in spec.linears()]
    names += [
        f"{spec.layer(i)}.self_attn.{x}" for i in range(spec.layers) for x in ("key", "value")
    ]
    manifest = SimpleNamespace(identity=CALIBRATION)
    calibration: Any = SimpleNamespace(manifest=manifest, observations=dict.fromkeys(names))
    return read_live(directory, calibration)


def test_vllm_finds_the_entry_point() -> None:
    (entry,) = entry_points(group="vllm.general_plugins", name="octet_counting")
    assert entry.load() is vllm_counting.register


def test_without_a_directory_vllm_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTET_COUNT", raising=False)
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu_worker", None)
    vllm_counting.register()  # would raise ImportError


def test_every_tensor_is_counted_without_padding(
    vllm: Callable[..., Vllm], spec: ModelSpec, tmp_path: Path
) -> None:
    worker = vllm().start()
    assert [step(worker, tokens) for tokens in (5, 5, 0)] == ["output"] * 3
    (window,) = read(tmp_path / "live", spec)
    assert window.tokens == 10
    widths = {linear.input: linear.in_features for linear in spec.linears()}
    assert widths.keys() < window.names
    for name in window.names:
        width = widths.get(name, spec.kv_heads * spec.head_dim)
        assert window.counts(name)[0x3F80] == window.counts(name).sum() == 10 * width  # of ones


def test_of_a_long_step_a_part_is_counted(
    vllm: Callable[..., Vllm], spec: ModelSpec, tmp_path: Path
) -> None:
    step(vllm().start(), 1000)
    (window,) = read(tmp_path / "live", spec)
    assert 100 <= window.tokens <= 128
    name = f"{spec.layer(0)}.self_attn.key"
    assert window.counts(name).sum() == window.tokens * spec.kv_heads * spec.head_dim


def test_counted_steps_replay_graphs_of_their_own(
    vllm: Callable[..., Vllm], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTET_COUNT_ONE_STEP_IN", "1000000")
    engine = vllm()
    worker = engine.start(graphs=(2, 4))
    for tokens in (2, 2, 4, 3):
        step(worker, tokens)
    assert engine.replayed == [f"{x} tokens, capture {y}" for x, y in ((2, 2), (2, 1), (4, 1))]


def test_a_graph_that_misses_a_tensor_is_an_error(
    vllm: Callable[..., Vllm], spec: ModelSpec
) -> None:
    model = Model(spec)
    model.skipped = frozenset({"attn"})
    engine = vllm(model)
    worker = engine.start(graphs=(2,))
    model.skipped = frozenset()
    step(worker, 3)  # without a graph, so nothing is missed
    with pytest.raises(RuntimeError, match=r"counted nothing of 4 tensors"):
        step(worker, 2)


def test_counted_steps_alone_have_hooks_and_run_uncompiled(
    vllm: Callable[..., Vllm], spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTET_COUNT_ONE_STEP_IN", "1000000")
    model = Model(spec)
    model.do_not_compile = False  # as vLLM marks what it compiles
    layer = model.get_submodule(model.names[0])
    steps = []

    def forward(x: torch.Tensor) -> None:
        steps.append((len(layer._forward_pre_hooks), model.do_not_compile))

    monkeypatch.setattr(layer, "forward", forward)
    worker = vllm(model).start()
    with pytest.raises(ValueError, match="out of memory"):
        step(worker, 2, fails=True)
    assert not layer._forward_pre_hooks and not model.do_not_compile
    for _ in range(3):
        step(worker, 2)
    assert steps == [(1, True), (0, False), (0, False)]


@pytest.mark.parametrize(
    ("cuda", "compiles", "kernels"),
    [
        (True, True, ["a kernel", "several kernels", "eager"]),
        (True, False, ["several kernels", "several kernels", "for the compiler"]),
        (False, True, ["several kernels", "several kernels", "for the compiler"]),
    ],
)
def test_counted_steps_alone_have_the_kernels_of_eager_mode(
    vllm: Callable[..., Vllm],
    spec: ModelSpec,
    monkeypatch: pytest.MonkeyPatch,
    cuda: bool,
    compiles: bool,
    kernels: list[str],
) -> None:
    monkeypatch.setenv("OCTET_COUNT_ONE_STEP_IN", "1000000")
    monkeypatch.setattr(Vllm, "cuda", cuda)
    monkeypatch.setattr(Vllm, "compiles", compiles)
    model = Model(spec)
    steps = []

    def forward(x: torch.Tensor) -> None:
        steps.append([WithKernel().forward(), Operation().forward(), engine.operations])

    monkeypatch.setattr(model.get_submodule(model.names[0]), "forward", forward)
    engine = vllm(model)
    worker = engine.start()
    with pytest.raises(ValueError, match="out of memory"):
        step(worker, 2, fails=True)
    for _ in range(2):
        step(worker, 2)
    assert steps == [kernels, ["several kernels", "several kernels", "for the compiler"]]


def test_a_tensor_that_the_first_step_misses_is_an_error(
    vllm: Callable[..., Vllm], spec: ModelSpec
) -> None:
    model = Model(spec)
    model.skipped = frozenset({"attn"})
    worker = vllm(model).start()
    with pytest.raises(RuntimeError, match=r"counted nothing of 4 tensors, .*--enforce-eager"):
        step(worker, 2)


def test_a_step_that_fails_is_not_counted(
    vllm: Callable[..., Vllm], spec: ModelSpec, tmp_path: Path
) -> None:
    worker = vllm().start()
    with pytest.raises(ValueError, match="out of memory"):
        step(worker, 100, fails=True)
    step(worker, 8)
    (window,) = read(tmp_path / "live", spec)
    assert window.tokens == 8


def test_replicas_of_one_vllm_keep_their_own_windows(
    vllm: Callable[..., Vllm], spec: ModelSpec, tmp_path: Path
) -> None:
    """Data-parallel engines share vLLM's instance_id and the ranks of their workers."""
    engine = vllm()
    for replica in (0, 1):
        step(engine.start(replica=replica), 8 + replica)
        read(tmp_path / "live", spec)
    assert sorted(x.tokens for x in read(tmp_path / "live", spec)) == [8, 9]


def test_layers_of_other_names_are_refused(vllm: Callable[..., Vllm], spec: ModelSpec) -> None:
    with pytest.raises(
        ConfigError, match=r"q_proj: this vLLM has no such layer.*unset OCTET_COUNT"
    ):
        vllm(Model(spec, prefix="language_model")).start()


@pytest.mark.parametrize(("asked", "given"), [(None, "0"), ("1", "1")])
def test_vllm_runs_its_first_model_runner_unless_told_otherwise(
    vllm: Callable[..., Vllm],
    monkeypatch: pytest.MonkeyPatch,
    asked: str | None,
    given: str,
) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    if asked is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", asked)
    vllm()
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == given


def test_the_second_model_runner_needs_eager_mode(vllm: Callable[..., Vllm]) -> None:
    worker = vllm().worker()
    worker.use_v2_model_runner = True
    worker.vllm_config.model_config.enforce_eager = False
    with pytest.raises(ConfigError, match="unset VLLM_USE_V2_MODEL_RUNNER, give --enforce-eager"):
        worker.load_model()


@pytest.mark.parametrize("name", ["ONE_STEP_IN", "WINDOW_TOKENS"])
@pytest.mark.parametrize("value", ["0", "-1", "x", ""])
def test_no_positive_integer_is_refused(
    vllm: Callable[..., Vllm], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(f"OCTET_COUNT_{name}", value)
    with pytest.raises(ConfigError, match=f"OCTET_COUNT_{name}={value}: give a positive integer"):
        vllm().start()


def test_rows_of_a_half_are_counted_by_their_own_codes() -> None:
    live: Any = SimpleNamespace(ends_with=lambda rows: True, end_step=lambda rows, read: read)
    model = torch.nn.ModuleDict({"linear": Layer()})
    counts = plugin.WorkerCounts(live, model, {"linear": ("input",)}, torch.device("cpu"))
    with counts.counting(2):
        model["linear"](torch.tensor([[1.0], [-1.0], [5.0]], dtype=torch.float16))
    np.testing.assert_array_equal(np.flatnonzero(counts._take()()["input"]), [0x3C00])
