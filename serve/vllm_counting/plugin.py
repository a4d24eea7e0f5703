"""Hooks the linear layers and attention of a vLLM worker, and counts what they get.

Each step of a worker is counted or not. In a counted step, and in no other, modules have hooks.
Compiled code does not run hooks, so a counted step runs the model uncompiled, with the kernels of
vLLM's eager mode. A CUDA graph replays what was launched while it was captured: vLLM captures its
graphs a second time, with hooks, and counted steps replay these. So all other steps are as they
would be without this plugin. The first step is always counted. If a counted step misses a tensor,
the worker raises, rather than serve on and count too little.

Of a step, at most `_ROWS` tokens are counted, evenly spaced.
"""

# vLLM is not installed where mypy runs.

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from octet.artifacts.live import Counting, LiveCounts
from octet.artifacts.manifest import Manifest
from octet.errors import ConfigError
from octet.model.spec import ModelSpec
from octet.numerics.counting import BINS

with suppress(ImportError):  # vLLM brings Triton for GPUs
    from serve.vllm_counting.count_rows import count_rows, in_order

__all__ = ["WorkerCounts", "observed_modules", "patch_workers"]

DIRECTORY = "OCTET_COUNT"  # the environment variable; also in `serve.vllm_counting`
_ROWS = 128
_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


class WorkerCounts:
    """The counts of one worker: int64 [observations, 32768] on its device, and its files."""

    def __init__(
        self,
        live: LiveCounts,
        model: Any,
        observed: Mapping[str, tuple[str, ...]],
        device: Any,
        kernels: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Counts what `observed_modules` found in `model`; counted steps run within `kernels`."""
        self.live = live
        self.active = False  # hooks are in place
        self.seen: set[int] = set()  # what the counted step has counted so far
        self._names = sorted({name for names in observed.values() for name in names})
        modules = dict(model.named_modules())
        self._hooks = [
            (modules[module], self._hook([self._names.index(name) for name in names]))
            for module, names in observed.items()
        ]
        self._compiled = [
            module for module in modules.values() if not getattr(module, "do_not_compile", True)
        ]
        self._counts = torch.zeros(len(self._names), BINS, dtype=torch.int64, device=device)
        self._tokens = 0  # of the counted step
        self._limit = torch.zeros(1, dtype=torch.int32, device=device)  # the same, for kernels
        self._checked = False
        self._kernels = kernels

    def counts(self, tokens: int) -> bool:
        """Returns True if the step that begins, of `tokens` tokens, is to be counted."""
        return tokens > 0 and (self.live.begin_step() or not self._checked)

    @contextmanager
    def counting(self, tokens: int) -> Iterator[None]:
        """Runs the model uncompiled and with hooks, which count its first `tokens` tokens."""
        self.seen = set()
        self._tokens = tokens
        self._limit.fill_(tokens)
        with ExitStack() as stack:
            for module, hook in self._hooks:
                handle = module.register_forward_pre_hook(hook, with_kwargs=True)
                stack.callback(handle.remove)
            for module in self._compiled:
                module.do_not_compile = True
                stack.callback(setattr, module, "do_not_compile", False)
            stack.enter_context(self._kernels())
            self.active = True
            try:
                yield
            finally:
                self.active = False

    def _hook(self, indices: list[int]) -> Callable[..., None]:
        first = len(indices) - 1  # attention gets the query before key and value

        def hook(module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            for index, x in zip(indices, [*given, *named.values()][first:], strict=False):
                self._add(index, x)

        return hook

    def _add(self, index: int, x: torch.Tensor) -> None:
        """Counts `x` [tokens or more, ...]: rows beyond the step's tokens are padding."""
        self.seen.add(index)
        if x.dtype not in (torch.float16, torch.bfloat16):
            x = x.to(torch.bfloat16)
        if x.is_cuda:
            count_rows(x, self._counts[index], self._limit, _ROWS)
            return
        rows = x[: self._tokens : max(1, -(-self._tokens // _ROWS))]
        bins = (rows.contiguous().view(torch.int16).flatten() & 0x7FFF).long()
        self._counts[index].scatter_add_(0, bins, torch.ones_like(bins))

    def end(self) -> None:
        """Ends a counted step. Raises RuntimeError if it missed a tensor."""
        missed = [name for index, name in enumerate(self._names) if index not in self.seen]
        if missed:
            raise RuntimeError(
                f"Octet counted nothing of {len(missed)} tensors, {missed[0]} first, as this"
                f" vLLM runs the model: start it with --enforce-eager, or unset {DIRECTORY}"
            )
        self._checked = True
        rows = -(-self._tokens // -(-self._tokens // _ROWS))
        self.live.end_step(rows, self._take() if self.live.ends_with(rows) else None)

    def _take(self) -> Callable[[], dict[str, NDArray[np.int64]]]:
        """Sets the counts to 0; returns a function with which another thread reads the old ones."""
        if self._counts.is_cuda:
            counts, counted = in_order(self._counts), torch.cuda.Event()
            counted.record()
        else:
            counts, counted = self._counts.clone(), None
        self._counts.zero_()

        def read() -> dict[str, NDArray[np.int64]]:
            if counted is not None:
                counted.synchronize()
            return dict(zip(self._names, counts.cpu().numpy(), strict=True))

        return read


_worker: WorkerCounts | None = None  # of this process


def observed_modules(spec: ModelSpec, modules: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Returns the observations of each of vLLM's `modules` that reads one, by the module's name.

    A linear layer reads one, and attention two: keys and values. Raises ConfigError for a model
    whose layers have other names.
    """
    found: dict[str, tuple[str, ...]] = {}
    for linear in spec.linears():
        if ".experts." in linear.name:  # one kernel computes all experts
            continue
        block, _, last = linear.name.rpartition(".")
        names = (linear.name, f"{block}.{_FUSED.get(last, last)}")
        module = next((name for name in names if name in modules), None)
        if module is None:
            raise ConfigError(
                f"{linear.name}: this vLLM has no such layer, so Octet cannot count its"
                f" activations: unset {DIRECTORY}"
            )
        if linear.input not in sum(found.values(), ()):
            found[module] = (linear.input,)
    for index in range(spec.layers):
        attention = f"{spec.layer(index)}.self_attn"
        if f"{attention}.attn" in modules:
            found[f"{attention}.attn"] = (f"{attention}.key", f"{attention}.value")
    return found


def options_of(environment: Mapping[str, str]) -> Counting:
    """Reads the options from environment variables. Raises ConfigError for no positive integer."""
    numbers = []
    for suffix, default in (("ONE_STEP_IN", 100), ("WINDOW_TOKENS", 4096)):
        text = environment.get(f"{DIRECTORY}_{suffix}", str(default))
        if not text.isdecimal() or int(text) < 1:
            raise ConfigError(f"{DIRECTORY}_{suffix}={text}: give a positive integer")
        numbers.append(int(text))
    return Counting(Path(environment[DIRECTORY]), *numbers)


def patch_workers() -> None:
    """Makes vLLM's workers count. Must run before they load a model."""
    from vllm.compilation.cuda_graph import CUDAGraphWrapper
    from vllm.forward_context import is_forward_context_available
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

    if hasattr(Worker, "octet_counts"):
        return
    Worker.octet_counts = None
    load, execute = Worker.load_model, Worker.execute_model
    capture, run = GPUModelRunner.capture_model, CUDAGraphWrapper.__call__

    @functools.wraps(load)
    def load_model(worker: Any, *given: Any, **named: Any) -> Any:
        result = load(worker, *given, **named)
        start(worker)
        return result

    @functools.wraps(execute)
    def execute_model(worker: Any, scheduled: Any, *given: Any, **named: Any) -> Any:
        tokens = scheduled.total_num_scheduled_tokens
        if _worker is None or not _worker.counts(tokens):
            return execute(worker, scheduled, *given, **named)
        with _worker.counting(tokens):
            result = execute(worker, scheduled, *given, **named)
        _worker.end()
        return result

    @functools.wraps(capture)
    def capture_model(runner: Any) -> int:
        size = int(capture(runner))
        if _worker is None:
            return size
        with _worker.counting(0):
            return size + int(capture(runner))

    @functools.wraps(run)
    def run_graph(wrapper: Any, *given: Any, **named: Any) -> Any:
        if _worker is None or not _worker.active or not is_forward_context_available():
            return run(wrapper, *given, **named)
        with _graphs_that_count(wrapper, _worker):
            return run(wrapper, *given, **named)

    Worker.load_model, Worker.execute_model = load_model, execute_model
    GPUModelRunner.capture_model, CUDAGraphWrapper.__call__ = capture_model, run_graph


@contextmanager
def _graphs_that_count(wrapper: Any, worker: WorkerCounts) -> Iterator[None]:
    """Makes one of vLLM's wrappers use CUDA graphs that count, a set beside its own.

    The hooks of a graph run while it is captured, and not when it is replayed. So the wrapper also
    keeps which tensors each graph counts.
    """
    from vllm.forward_context import get_forward_context

    graphs: dict[Any, Any] = vars(wrapper).setdefault("octet_graphs", {})
    counted: dict[Any, frozenset[int]] = vars(wrapper).setdefault("octet_counted", {})
    others, wrapper.concrete_cudagraph_entries = wrapper.concrete_cudagraph_entries, graphs
    worker.seen = set()
    try:
        yield
    finally:
        wrapper.concrete_cudagraph_entries = others
    graph = get_forward_context().batch_descriptor
    if worker.seen:
        counted[graph] = frozenset(worker.seen)
    worker.seen |= counted.get(graph, frozenset())


def eager_kernels(compilation: Any) -> Callable[[], AbstractContextManager[None]]:
    """Returns a context in which a model runs with the kernels of vLLM's eager mode.

    For its compiler, vLLM writes norms and the like as several small operations. Uncompiled, each
    of them is a kernel of its own. `compilation` is vLLM's configuration. The context changes
    nothing without a CUDA device, or where vLLM does not compile.
    """
    from vllm.config import CompilationMode
    from vllm.platforms import current_platform

    if not current_platform.is_cuda() or compilation.mode == CompilationMode.NONE:
        return nullcontext
    from vllm.model_executor.custom_op import CustomOp

    forward = CustomOp.forward
    eager = SimpleNamespace(mode=CompilationMode.NONE, backend=compilation.backend)
    operations = current_platform.get_default_ir_op_priority(
        SimpleNamespace(compilation_config=eager)
    )

    def forward_cuda(operation: Any, *given: Any, **named: Any) -> Any:
        if type(operation).forward_cuda is CustomOp.forward_cuda:  # it has none
            return forward(operation, *given, **named)
        return operation.forward_cuda(*given, **named)

    @contextmanager
    def kernels() -> Iterator[None]:
        CustomOp.forward = forward_cuda
        try:
            with operations.set_priority():
                yield
        finally:
            CustomOp.forward = forward

    return kernels


def start(worker: Any) -> None:
    """Begins to count in `worker`, which has loaded its model."""
    global _worker
    config = worker.vllm_config
    path = Path(config.model_config.model)
    manifest = Manifest.load(path, "checkpoint", verify=False)
    if getattr(worker, "use_v2_model_runner", False) and not config.model_config.enforce_eager:
        raise ConfigError(
            "vLLM's second model runner replays CUDA graphs that count nothing: unset"
            f" VLLM_USE_V2_MODEL_RUNNER, give --enforce-eager, or unset {DIRECTORY}"
        )
    model = worker.model_runner.get_model()
    observed = observed_modules(manifest.model.spec, dict(model.named_modules()))
    # Data-parallel replicas share the instance's id, and count their ranks from 0 each.
    replica = getattr(config.parallel_config, "data_parallel_index", 0)
    engine = f"{replica}.{config.instance_id}".encode().hex()[:64]
    live = LiveCounts(options_of(os.environ), manifest, engine=engine, rank=worker.rank)
    kernels = eager_kernels(config.compilation_config)
    _worker = WorkerCounts(live, model, observed, worker.device, kernels)
