"""Builds an engine from an ONNX file, with TensorRT or with TensorRT-RTX.

Any error of the parser or the builder ends the build, and so does the warning that an input of the
graph is not read, which would leave it without effect. The parts of TensorRT's Python API used here
exist in every release that tests/export/bindings lists.

The timing cache records how fast each kernel was, so that the next build need not try them again.
"""

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from export.engine import layers as tensorrt_layers
from export.engine.builder_progress import progress_monitor
from export.engine.library import RTX, Name
from octet.errors import ExportError, UnsupportedError
from octet.hardware.tensorrt_log import logger, one_line

__all__ = ["Options", "Plan", "Precision", "Profile", "build_plan"]


def read_timings(trt: Any, config: Any, path: Path) -> None:
    """Loads the timing cache `path` into `config`, or an empty one if there is no such file.

    Raises ExportError for a file that is not the cache of this release and this GPU.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        content = b""
    except OSError as error:
        raise ExportError(f"timing cache {path}: {error.strerror}") from None
    cache = config.create_timing_cache(content)
    if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
        raise ExportError(
            f"timing cache {path}: not one of TensorRT {trt.__version__} and this GPU;"
            " name another file"
        )


def write_timings(config: Any, path: Path) -> None:
    """Writes the timing cache to a temporary file and moves it: two builds may end at once."""
    content = config.get_timing_cache().serialize()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, written = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with open(handle, "wb") as file:
                file.write(content)
            os.chmod(written, 0o644)  # mkstemp makes files that only their owner can read
            os.replace(written, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(written)
    except OSError as error:
        raise ExportError(f"timing cache {path}: {error.strerror}") from None


WORKSPACE_BYTES = 1 << 30  # the most that one layer may use as scratch memory
LEVELS = range(6)  # optimization levels: a higher one builds more slowly and runs faster

# The shapes of one profile: input name -> (smallest, most usual, largest).
Shape = tuple[int, ...]
Profile = Mapping[str, tuple[Shape, Shape, Shape]]


@dataclass(frozen=True)
class Options:
    """Options of a build; `timing_cache` is read if it exists, and written after the build."""

    targets: Sequence[str]
    workspace_bytes: int = WORKSPACE_BYTES
    optimization_level: int | None = None  # None: the builder's own, 3
    timing_cache: Path | None = None

    def check(self, name: Name) -> None:
        """Raises UnsupportedError for an option that the builder `name` does not have."""
        if self.optimization_level is not None and self.optimization_level not in LEVELS:
            raise UnsupportedError(
                f"optimization level {self.optimization_level}: it is 0 (fastest build) to"
                f" {LEVELS[-1]} (fastest engine)"
            )
        if self.timing_cache is not None and name == RTX:
            raise UnsupportedError(
                f"--timing-cache: {RTX} times nothing while it builds, and keeps none; leave it out"
            )


@dataclass(frozen=True)
class Precision:
    """The precision of the quantized linears' GEMMs, such as "fp8" or "float16", by module name.

    `of` is "engine" if every GEMM was found among the compiled layers. It is "network" if only the
    parsed network is known, which the compiler may have changed.
    """

    of: str
    products: Mapping[str, str]
    layers: int  # number of compiled layers or, with "network", of parsed ones
    matmuls: int  # number of MatMuls in the network, quantized or not


@dataclass(frozen=True)
class Plan:
    """A serialized engine; `data` has the buffer interface."""

    data: Any
    precision: Precision
    seconds: float
    scratch_bytes: int | None  # memory during execution, besides weights, inputs and outputs


def build_plan(
    name: Name,
    trt: Any,
    model: Path,
    profiles: Mapping[str, Profile],
    options: Options,
    products: Mapping[str, str],
    console: Console | None = None,
) -> Plan:
    """Parses the ONNX file `model` and compiles it.

    `products` maps a quantized linear to its MatMul node. Raises ExportError with the first
    complaint of the parser or the builder, and for any input that either would leave unused.
    """
    stop = threading.Event()
    session = _Session(name, trt, options)
    # Builds on a separate thread. On the main thread, Ctrl-C would raise its exception during one
    # of TensorRT's calls to Python, and TensorRT swallows that exception.
    with ThreadPoolExecutor(max_workers=1) as pool:
        try:
            return pool.submit(session.build, model, profiles, products, console, stop).result()
        except KeyboardInterrupt:
            stop.set()
            raise


@dataclass
class _Session:
    """One build; `log` must outlive `builder`, and `builder` must outlive `network`."""

    name: Name
    trt: Any
    options: Options
    log: Any = field(init=False)
    builder: Any = field(init=False)
    network: Any = field(init=False)

    def build(
        self,
        model: Path,
        profiles: Mapping[str, Profile],
        products: Mapping[str, str],
        console: Console | None,
        stop: threading.Event,
    ) -> Plan:
        trt, where = self.trt, ", ".join(self.options.targets)
        self.log = logger(trt)
        self.log.clear()
        self.builder = trt.Builder(self.log)
        # TensorRT 11 has no other kind of network and ignores the flag.
        flag = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        self.network = self.builder.create_network(flag)
        self._parse(model)
        config = self._configure(profiles)
        started = time.monotonic()
        with progress_monitor(trt, console, stop) as monitor:
            config.progress_monitor = monitor
            data = self.builder.build_serialized_network(self.network, config)
        seconds = time.monotonic() - started
        self.log.check(f"{self.name}: the builder for {where}")
        if data is None:
            why = f": {one_line(self.log.skipped[0])}" if self.log.skipped else ", not saying why"
            raise ExportError(f"{self.name} built no engine for {where}{why}")
        if self.options.timing_cache is not None:
            write_timings(config, self.options.timing_cache)
        return Plan(data, self._precision(data, products), seconds, self.log.scratch_bytes)

    def _parse(self, model: Path) -> None:
        parser = self.trt.OnnxParser(self.network, self.log)
        if not parser.parse_from_file(str(model)):
            errors = [parser.get_error(index) for index in range(parser.num_errors)]
            said = "; ".join(f"{error.node_name() or 'graph'}: {error.desc()}" for error in errors)
            raise ExportError(f"{self.name}'s parser refuses the graph: {one_line(said)}")
        self.log.check(f"{self.name}: the parser")

    def _configure(self, profiles: Mapping[str, Profile]) -> Any:
        trt, options, config = self.trt, self.options, self.builder.create_builder_config()
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_bytes)
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # the layer report has names
        if options.optimization_level is not None:
            config.builder_optimization_level = options.optimization_level
        if self.name == RTX:
            self._target(config)
        elif options.timing_cache is not None:
            read_timings(trt, config, options.timing_cache)
        for name, shapes in profiles.items():
            profile = self.builder.create_optimization_profile()
            for index in range(self.network.num_inputs):
                value = self.network.get_input(index).name
                profile.set_shape(value, *shapes[value])
            if config.add_optimization_profile(profile) < 0:
                raise ExportError(f"{self.name} refuses the optimization profile '{name}'")
        return config

    def _target(self, config: Any) -> None:
        config.num_compute_capabilities = len(self.options.targets)
        for index, target in enumerate(self.options.targets):
            capability = getattr(self.trt.ComputeCapability, target.upper(), None)
            if capability is None or not config.set_compute_capability(capability, index):
                version = self.trt.__version__
                raise ExportError(f"{self.name} {version} does not accept the target {target}")

    def _precision(self, data: Any, products: Mapping[str, str]) -> Precision:
        compiled = self._layers(data)
        found = tensorrt_layers.precisions(compiled, products)
        parsed = [self.network.get_layer(index) for index in range(self.network.num_layers)]
        matmuls = [item for item in parsed if item.type == self.trt.LayerType.MATRIX_MULTIPLY]
        if found.keys() == products.keys():
            return Precision("engine", found, len(compiled), len(matmuls))
        by_name = {item.name: item for item in matmuls}
        makers = {
            item.get_output(index).name: item
            for item in parsed
            for index in range(item.num_outputs)
        }
        found = {
            module: tensorrt_layers.precision_of(_stored_types(self.trt, by_name[node], makers))
            for module, node in products.items()
            if node in by_name
        } | found
        return Precision("network", found, len(parsed), len(matmuls))

    def _layers(self, data: Any) -> list[tensorrt_layers.Layer]:
        """Returns the engine's layers: from TensorRT-RTX's log, or from TensorRT's inspector."""
        if self.name == RTX:
            return tensorrt_layers.from_log(self.log.layers)
        runtime = self.trt.Runtime(self.log)
        engine = runtime.deserialize_cuda_engine(data)
        self.log.check(f"{self.name}: the run-time library")
        if engine is None:
            raise ExportError(f"{self.name} does not load the engine that it has built")
        inspector = engine.create_engine_inspector()
        text = inspector.get_engine_information(self.trt.LayerInformationFormat.JSON)
        return tensorrt_layers.from_json(text)


def _stored_types(trt: Any, product: Any, makers: Mapping[str, Any]) -> list[str]:
    """Returns the types of a parsed GEMM's two operands before dequantization, else "float16"."""
    kinds, names = trt.LayerType, {trt.DataType.FP8: "fp8", trt.DataType.FP4: "fp4"}
    passing = (kinds.SHUFFLE, kinds.CAST, kinds.IDENTITY)
    found = []
    for index in (0, 1):
        layer = makers.get(product.get_input(index).name)
        while layer is not None and layer.type in passing:
            layer = makers.get(layer.get_input(0).name)
        if layer is not None and layer.type == kinds.DEQUANTIZE:
            found.append(names.get(layer.get_input(0).dtype, "float16"))
        else:
            found.append("float16")
    return found
