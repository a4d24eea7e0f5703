"""Hooks the linear layers and attention of a vLLM worker, and counts what they get.

Each step of a worker is counted or not. An eager model has hooks in counted steps alone. Compiled
code does not run Python hooks, so there an operator takes their place, which does nothing in other
steps. A CUDA graph records what an operator launches while it is captured, which is nothing: a
counted step runs without graphs, and all others as they would without this plugin. The first step
is always counted. If it misses a tensor, the worker raises, rather than serve on and count nothing.

Of a step, at most `_ROWS` tokens are counted, evenly spaced.
"""

# vLLM is not installed where mypy runs.

import functools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from octet.artifacts.live import Counting, LiveCounts
from octet.artifacts.manifest import Manifest
from octet.errors import ConfigError
from octet.model.spec import ModelSpec
from octet.numerics.counting import BINS

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
        self, live: LiveCounts, modules: Mapping[str, tuple[str, ...]], device: torch.device
    ) -> None:
        """`modules` has the observations of each hooked module, see `observed_modules`."""
        names = sorted({name for observed in modules.values() for name in observed})
        self.live = live
        self.modules = {
            module: tuple(names.index(name) for name in observed)
            for module, observed in modules.items()
        }
        self.eager: list[tuple[torch.nn.Module, _Hook]] = []  # hooked in counted steps alone
        self._names = names
        self._counts = torch.zeros(len(names), BINS, dtype=torch.int64, device=device)
        self._tokens = 0  # of the counted step; 0: this step is not counted
        self._checked = False

    @property
    def active(self) -> bool:
        return self._tokens > 0

    def begin(self, tokens: int) -> bool:
        """Begins a step of `tokens` tokens; returns True if it is counted."""
        if tokens > 0 and (self.live.begin_step() or not self._checked):
            self._tokens = tokens
        return self.active

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Hooks the modules of an eager model. A hook that does nothing costs 3 µs a module."""
        handles = [
            module.register_forward_pre_hook(hook, with_kwargs=True) for module, hook in self.eager
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def add(self, index: int, x: torch.Tensor) -> None:
        """Counts `x` [tokens or more, ...]: rows beyond the step's tokens are padding."""
        rows = x[: self._tokens : -(-self._tokens // _ROWS)]
        codes = rows if rows.dtype == torch.float16 else rows.to(torch.bfloat16)
        bins = (codes.contiguous().view(torch.int16).flatten() & 0x7FFF).long()
        self._counts[index].scatter_add_(0, bins, torch.ones_like(bins))

    def abandon(self) -> None:
        """Leaves a counted step that failed."""
        self._tokens = 0

    def end(self) -> None:
        """Ends a counted step. Raises RuntimeError if the first one missed a tensor."""
        tokens, self._tokens = self._tokens, 0
        if not self._checked:
            counted = self._counts.any(dim=1).tolist()
            missed = [name for name, some in zip(self._names, counted, strict=True) if not some]
            if missed:
                raise RuntimeError(
                    f"Octet counted nothing of {len(missed)} tensors, {missed[0]} first, as this"
                    f" vLLM runs the model: start it with --enforce-eager, or unset {DIRECTORY}"
                )
            self._checked = True
        rows = -(-tokens // -(-tokens // _ROWS))
        if self.live.ends_with(rows):
            for name, counts in zip(self._names, self._counts.cpu().numpy(), strict=True):
                self.live.add(name, counts)
            self._counts.zero_()
        self.live.end_step(rows)


_worker: WorkerCounts | None = None  # of this process


def _count(x: torch.Tensor, state: torch.Tensor, index: int) -> None:
    if _worker is not None and _worker.active:
        _worker.add(index, x)


def _count_nothing(x: torch.Tensor, state: torch.Tensor, index: int) -> None:
    pass


# `torch.library.custom_op` would take 20 µs a call instead of 5, in steps without a CUDA graph.
# A compiler would drop an operator that changes nothing, so it is said to change `state`.
_OPERATOR = "octet::count_activations"
torch.library.define(_OPERATOR, "(Tensor x, Tensor(a!) state, int index) -> ()")
torch.library.impl(_OPERATOR, "CompositeExplicitAutograd", _count)
torch.library.register_fake(_OPERATOR, _count_nothing)


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


def attach(model: Any, counts: WorkerCounts, device: torch.device, eager: bool) -> None:
    """Hooks the modules of `model`, before anything compiles it; if `eager`, in counted steps."""
    modules = dict(model.named_modules())
    for name, indices in counts.modules.items():
        if eager:
            counts.eager.append((modules[name], _Hook(indices)))
            continue
        modules[name].register_buffer(
            "octet_state", torch.zeros(1, device=device), persistent=False
        )
        modules[name].register_forward_pre_hook(_Hook(indices), with_kwargs=True)


class _Hook:
    """Counts the inputs of a module: the only one of a linear layer, the last two of attention."""

    def __init__(self, indices: tuple[int, ...]) -> None:
        self._indices = indices

    def __call__(self, module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        tensors = [*given, *named.values()]
        first = len(self._indices) - 1  # attention gets the query before key and value
        for index, x in zip(self._indices, tensors[first:], strict=False):
            if torch.compiler.is_compiling():
                torch.ops.octet.count_activations(x, module.octet_state, index)
            elif _worker is not None and _worker.active:
                _worker.add(index, x)


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
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
    from vllm.v1.worker.gpu_worker import Worker

    if hasattr(Worker, "octet_counts"):
        return
    os.environ["VLLM_DISABLE_COMPILE_CACHE"] = "1"  # it would bring code without the operator
    Worker.octet_counts = None
    load, execute, dispatch = Worker.load_model, Worker.execute_model, CudagraphDispatcher.dispatch

    @functools.wraps(load)
    def load_model(worker: Any, *given: Any, **named: Any) -> Any:
        result = load(worker, *given, **named)
        start(worker)
        return result

    @functools.wraps(execute)
    def execute_model(worker: Any, scheduled: Any, *given: Any, **named: Any) -> Any:
        if _worker is None or not _worker.begin(scheduled.total_num_scheduled_tokens):
            return execute(worker, scheduled, *given, **named)
        try:
            with _worker.hooked():
                result = execute(worker, scheduled, *given, **named)
        except BaseException:
            _worker.abandon()
            raise
        _worker.end()
        return result

    @functools.wraps(dispatch)
    def without_graph(self: Any, num_tokens: int, *given: Any, **named: Any) -> Any:
        if _worker is not None and _worker.active:
            named = {"valid_modes": frozenset({_no_graph()})}
            given = ()
        return dispatch(self, num_tokens, *given, **named)

    Worker.load_model, Worker.execute_model = load_model, execute_model
    CudagraphDispatcher.dispatch = without_graph


def _no_graph() -> Any:
    from vllm.config import CUDAGraphMode

    return CUDAGraphMode.NONE


def start(worker: Any) -> None:
    """Begins to count in `worker`, which has loaded its model."""
    global _worker
    config = worker.vllm_config
    path = Path(config.model_config.model)
    manifest = Manifest.load(path, "checkpoint", verify=False)
    if getattr(worker, "use_v2_model_runner", False) and not config.model_config.enforce_eager:
        raise ConfigError(
            "vLLM's second model runner replays CUDA graphs that count nothing: start it with"
            f" VLLM_USE_V2_MODEL_RUNNER=0 or --enforce-eager, or unset {DIRECTORY}"
        )
    model = worker.model_runner.get_model()
    observed = observed_modules(manifest.model.spec, dict(model.named_modules()))
    # Data-parallel replicas share the instance's id, and count their ranks from 0 each.
    replica = getattr(config.parallel_config, "data_parallel_index", 0)
    engine = f"{replica}.{config.instance_id}".encode().hex()[:64]
    live = LiveCounts(options_of(os.environ), manifest, engine=engine, rank=worker.rank)
    _worker = WorkerCounts(live, observed, worker.device)
    attach(model, _worker, worker.device, bool(config.model_config.enforce_eager))
