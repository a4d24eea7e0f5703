"""Builds a TensorRT engine from an ONNX file, with TensorRT-RTX, on a machine without a GPU.

TensorRT-RTX comes from PyPI, and its Python API is TensorRT's; what differs is that the targets are
named, since no GPU has to be there. Whatever the parser or the builder has to say against a graph
ends the build: an input that it would not read, above all, for it only warns of that.
"""

import importlib
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console

from export.tensorrt_progress import progress_monitor
from octet.errors import ExportError, UnsupportedError, nearest

__all__ = ["NAME", "Network", "Plan", "Profile", "build_plan", "check_targets", "load"]

NAME = "TensorRT-RTX"
# Compute capabilities that it compiles for. FP8 exists from 8.9 on.
TARGETS = {name: name.upper() for name in ("sm75", "sm80", "sm86", "sm89", "sm120", "sm121")}
WITHOUT_FP8 = ("sm75", "sm80", "sm86")
WITH_FP8 = [name for name in TARGETS if name not in WITHOUT_FP8]
WORKSPACE_BYTES = 1 << 30  # the most that one layer may use as scratch memory

# The shapes of one profile: input name -> (smallest, most usual, largest).
Shape = tuple[int, ...]
Profile = Mapping[str, tuple[Shape, Shape, Shape]]


@dataclass(frozen=True)
class Network:
    """Facts of the parsed network, before compilation."""

    layers: int
    matmuls: int
    fp8_matmuls: int  # those with both inputs dequantized from FP8


@dataclass(frozen=True)
class Plan:
    """A serialized engine; `data` has the buffer interface."""

    data: Any
    version: str
    network: Network


def check_targets(targets: Sequence[str]) -> list[str]:
    """The targets in lower case, each once.

    Raises UnsupportedError, before anything else is done, for one that is unknown or has no FP8.
    """
    names = list(dict.fromkeys(target.strip().lower() for target in targets))
    usable = ", ".join(WITH_FP8)
    for name in names:
        if name == "sm90":
            raise UnsupportedError(
                f"target sm90: {NAME} does not run on Hopper, which needs the full TensorRT;"
                f" this release builds FP8 for {usable}"
            )
        if name in WITHOUT_FP8:
            raise UnsupportedError(
                f"target {name}: a GPU before sm89 has no FP8; {NAME} builds FP8 for {usable}"
            )
        if name not in TARGETS:
            raise UnsupportedError(f"unknown target '{name}'{nearest(name, WITH_FP8)}")
    return names


def load() -> ModuleType:
    """The module of TensorRT-RTX.

    Raises UnsupportedError, saying how to install it, if it is not there.
    """
    for name in ("tensorrt_rtx", "tensorrt_rtx_bindings"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        except (ImportError, OSError) as error:
            raise UnsupportedError(f"{NAME} is installed but cannot be loaded: {error}") from None
    raise UnsupportedError(f"{NAME} is not installed: pip install 'octet[tensorrt-rtx]'")


def build_plan(
    model: Path,
    profiles: Mapping[str, Profile],
    targets: Sequence[str],
    console: Console | None = None,
) -> Plan:
    """Parses the ONNX file `model` and compiles it for `targets`.

    Raises ExportError with the first complaint of the parser or the builder, and for any input
    that either would leave unused.
    """
    trt, stop = load(), threading.Event()
    # In a thread of its own: TensorRT swallows an exception that Ctrl-C raises in one of its
    # calls to Python, and those are the moments at which the main thread would notice it.
    with ThreadPoolExecutor(max_workers=1) as pool:
        plan = pool.submit(_build, trt, model, profiles, targets, console, stop)
        try:
            return plan.result()
        except KeyboardInterrupt:
            stop.set()
            raise


def _build(
    trt: Any,
    model: Path,
    profiles: Mapping[str, Profile],
    targets: Sequence[str],
    console: Console | None,
    stop: threading.Event,
) -> Plan:
    session = _Session(trt, _logger(trt))
    network = session.parse(model)
    config = session.configure(profiles, targets)
    with progress_monitor(trt, console, stop) as monitor:
        config.progress_monitor = monitor
        data = session.builder.build_serialized_network(session.network, config)
    session.log.check(f"the builder for {', '.join(targets)}")
    if data is None:
        raise ExportError(f"{NAME} built no engine for {', '.join(targets)} and did not say why")
    return Plan(data, trt.__version__, network)


@dataclass
class _Session:
    """The objects of one build, which must outlive each other in this order."""

    trt: ModuleType
    log: Any
    builder: Any = field(init=False)
    network: Any = field(init=False)

    def __post_init__(self) -> None:
        self.log.clear()
        self.builder = self.trt.Builder(self.log)
        # TensorRT 11 knows no other kind of network and ignores the flag.
        flag = 1 << int(self.trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        self.network = self.builder.create_network(flag)

    def parse(self, model: Path) -> Network:
        parser = self.trt.OnnxParser(self.network, self.log)
        if not parser.parse_from_file(str(model)):
            errors = [parser.get_error(index) for index in range(parser.num_errors)]
            said = "; ".join(f"{error.node_name() or 'graph'}: {error.desc()}" for error in errors)
            raise ExportError(f"{NAME}'s parser refuses the graph: {_line(said)}")
        self.log.check("the parser")
        return count(self.trt, self.network)

    def configure(self, profiles: Mapping[str, Profile], targets: Sequence[str]) -> Any:
        trt, config = self.trt, self.builder.create_builder_config()
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, WORKSPACE_BYTES)
        config.num_compute_capabilities = len(targets)
        for index, target in enumerate(targets):
            capability = getattr(trt.ComputeCapability, TARGETS[target], None)
            if capability is None or not config.set_compute_capability(capability, index):
                raise ExportError(f"{NAME} {trt.__version__} does not accept the target {target}")
        for name, shapes in profiles.items():
            profile = self.builder.create_optimization_profile()
            for index in range(self.network.num_inputs):
                value = self.network.get_input(index).name
                profile.set_shape(value, *shapes[value])
            if config.add_optimization_profile(profile) < 0:
                raise ExportError(f"{NAME} refuses the optimization profile '{name}'")
        return config


def count(trt: Any, network: Any) -> Network:
    """Counts the layers, and the matrix products whose two inputs were FP8."""
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    makers = {
        layer.get_output(index).name: layer
        for layer in layers
        for index in range(layer.num_outputs)
    }
    passing = (trt.LayerType.SHUFFLE, trt.LayerType.CAST)

    def from_fp8(tensor: Any) -> bool:
        layer = makers.get(tensor.name)
        while layer is not None and layer.type in passing:
            layer = makers.get(layer.get_input(0).name)
        if layer is None or layer.type != trt.LayerType.DEQUANTIZE:
            return False
        return bool(layer.get_input(0).dtype == trt.DataType.FP8)

    products = [layer for layer in layers if layer.type == trt.LayerType.MATRIX_MULTIPLY]
    fp8 = [layer for layer in products if all(from_fp8(layer.get_input(i)) for i in (0, 1))]
    return Network(len(layers), len(products), len(fp8))


_LOGGERS: dict[str, Any] = {}


def _logger(trt: Any) -> Any:
    """The one logger of the process: TensorRT ignores a second one, with a warning."""
    if trt.__name__ not in _LOGGERS:

        class Log(trt.ILogger):  # type: ignore[misc]
            """Keeps errors, and what was said of unused inputs; nothing is printed."""

            def __init__(self) -> None:
                trt.ILogger.__init__(self)
                self.clear()

            def clear(self) -> None:
                self.errors: list[str] = []
                self.unused: list[str] = []

            def log(self, severity: Any, message: str) -> None:
                if severity <= trt.ILogger.ERROR:
                    self.errors.append(message)
                if "Unused Input" in message:
                    self.unused.append(message)

            def check(self, who: str) -> None:
                if self.unused:
                    said = _line("; ".join(self.unused))
                    raise ExportError(f"{NAME}: {who} would drop a part of the graph: {said}")
                if self.errors:
                    # What follows the first is its consequence, or that no GPU is here.
                    raise ExportError(f"{NAME}: {who} refuses the graph: {_line(self.errors[0])}")

        _LOGGERS[trt.__name__] = Log()
    return _LOGGERS[trt.__name__]


def _line(text: str) -> str:
    return " ".join(text.split())
