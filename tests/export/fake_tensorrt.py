"""Stands for both TensorRT; compiles nothing: what a test sets decides what it accepts and says.

As `tensorrt_rtx` it logs the layers of the engine, as `tensorrt` its inspector tells them.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx

__version__ = "1.7.fake"


class ILogger:
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)

    def log(self, severity: int, message: str) -> None:
        raise NotImplementedError


class IProgressMonitor:
    pass


class Behaviour:
    """What the next build does; `says` is logged by the builder, `step` is its only step.

    `multiplies` is the type in which the engine multiplies, but for the head; None if no layer
    names what it computes.
    """

    def __init__(self) -> None:
        self.says: list[tuple[int, str]] = []
        self.parser_errors: list[str] = []
        self.capabilities = True
        self.step: Any = lambda monitor: monitor.step_complete("Building", 0)
        self.plan: bytes | None = b"plan"
        self.loads = True
        self.multiplies: str | None = "FP8"
        self.timings_match = True
        self.profiles: list[dict[str, Any]] = []
        self.config: Config | None = None
        self.network: Network | None = None


behaviour = Behaviour()
NetworkDefinitionCreationFlag = SimpleNamespace(STRONGLY_TYPED=0)
MemoryPoolType = SimpleNamespace(WORKSPACE=0)
ComputeCapability = SimpleNamespace(SM89=89, SM120=120)
LayerType = SimpleNamespace(SHUFFLE=0, CAST=1, IDENTITY=2, DEQUANTIZE=3, MATRIX_MULTIPLY=4)
DataType = SimpleNamespace(FP8=0, FP4=1)
ProfilingVerbosity = SimpleNamespace(DETAILED=0)
LayerInformationFormat = SimpleNamespace(JSON=0)


class TimingCache:
    def __init__(self, content: bytes) -> None:
        self.content = content

    def serialize(self) -> bytes:
        return self.content + b"timed;"


class Config:
    num_compute_capabilities = 0
    builder_optimization_level = 3
    profiling_verbosity: Any = None
    progress_monitor: Any = None

    def __init__(self) -> None:
        self.capabilities: list[int] = []
        self.pools: dict[int, int] = {}
        self.timings: TimingCache | None = None

    def set_memory_pool_limit(self, pool: int, size: int) -> None:
        self.pools[pool] = size

    def set_compute_capability(self, capability: int, index: int) -> bool:
        assert index < self.num_compute_capabilities
        self.capabilities.append(capability)
        return behaviour.capabilities

    def add_optimization_profile(self, profile: "Profile") -> int:
        behaviour.profiles.append(profile.shapes)
        return len(behaviour.profiles) - 1

    def create_timing_cache(self, content: bytes) -> TimingCache:
        return TimingCache(content)

    def set_timing_cache(self, cache: TimingCache, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch, "timings of another GPU are of no use"
        self.timings = cache
        return behaviour.timings_match

    def get_timing_cache(self) -> TimingCache | None:
        return self.timings


class Profile:
    def __init__(self) -> None:
        self.shapes: dict[str, Any] = {}

    def set_shape(self, name: str, *shapes: tuple[int, ...]) -> None:
        self.shapes[name] = shapes


class Network:
    """Of the graph it has the inputs and the products, which read FP8."""

    def __init__(self) -> None:
        self.inputs: list[str] = []
        self.layers: list[SimpleNamespace] = []

    @property
    def num_inputs(self) -> int:
        return len(self.inputs)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def get_input(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(name=self.inputs[index])

    def get_layer(self, index: int) -> SimpleNamespace:
        return self.layers[index]

    def take(self, graph: onnx.GraphProto) -> None:
        self.inputs = [value.name for value in graph.input]
        codes = SimpleNamespace(name="codes", dtype=DataType.FP8)
        value = SimpleNamespace(name="value")
        self._add(LayerType.DEQUANTIZE, "dq", [codes], value)
        for node in graph.node:
            if node.op_type == "MatMul":
                self._add(
                    LayerType.MATRIX_MULTIPLY,
                    node.name,
                    [value, value],
                    SimpleNamespace(name=f"{node.name}.value"),
                )

    def _add(self, kind: int, name: str, reads: list[Any], gives: SimpleNamespace) -> None:
        self.layers.append(
            SimpleNamespace(
                type=kind,
                name=name,
                get_input=reads.__getitem__,
                get_output=[gives].__getitem__,
                num_outputs=1,
            )
        )

    def compiled(self) -> list[dict[str, Any]]:
        """The engine's layers as its inspector tells them: one for each product."""
        return [
            {
                "Name": layer.name,
                "LayerType": "gemm",
                "Inputs": [tensor(self._type(layer)), tensor(self._type(layer))],
                "Constants": [],
                "Metadata": "" if behaviour.multiplies is None else f"[ONNX Layer: {layer.name}]",
            }
            for layer in self.layers
            if layer.type == LayerType.MATRIX_MULTIPLY
        ]

    def _type(self, layer: SimpleNamespace) -> str:
        return "Half" if layer.name == "lm_head" else behaviour.multiplies or "Half"


def tensor(kind: str) -> dict[str, Any]:
    return {"Name": "x", "Dimensions": [4, 8], "Datatype": kind, "Format": "Row major"}


class OnnxParser:
    def __init__(self, network: Network, logger: ILogger) -> None:
        self.network = network

    @property
    def num_errors(self) -> int:
        return len(behaviour.parser_errors)

    def get_error(self, index: int) -> SimpleNamespace:
        said = behaviour.parser_errors[index]
        return SimpleNamespace(node_name=lambda: "node", desc=lambda: said)

    def parse_from_file(self, path: str) -> bool:
        self.network.take(onnx.load(Path(path), load_external_data=False).graph)
        return not behaviour.parser_errors


class Builder:
    def __init__(self, logger: ILogger) -> None:
        self.logger = logger

    def create_network(self, flags: int) -> Network:
        assert flags == 1, "strongly typed"
        behaviour.network = Network()
        return behaviour.network

    def create_builder_config(self) -> Config:
        behaviour.config = Config()
        return behaviour.config

    def create_optimization_profile(self) -> Profile:
        return Profile()

    def build_serialized_network(self, network: Network, config: Config) -> bytes | None:
        assert config.profiling_verbosity == ProfilingVerbosity.DETAILED
        monitor = config.progress_monitor
        monitor.phase_start("Building", None, 2)
        for severity, message in behaviour.says:
            self.logger.log(severity, message)
        going_on = behaviour.step(monitor)
        monitor.phase_finish("Building")
        self.logger.log(ILogger.INFO, "Total Activation Memory: 4096 bytes")
        if config.num_compute_capabilities:
            self.logger.log(ILogger.VERBOSE, log_of(network.compiled()))
        return behaviour.plan if going_on else None


def log_of(layers: list[dict[str, Any]]) -> str:
    """As TensorRT-RTX writes them."""
    lines = ["Layers:"]
    for layer in layers:
        reads = ", ".join(
            f"{{ Name: {x['Name']}, Dimensions: [4,8], Datatype: {x['Datatype']} }}"
            for x in layer["Inputs"]
        )
        lines.append(
            f"Name: {layer['Name']}, LayerType: {layer['LayerType']}, Inputs: [ {reads}], "
            f"Outputs: [ {{ Name: y, Dimensions: [4,8], Datatype: Half }}], TacticName: t, "
            f"StreamId: 0, Metadata: {layer['Metadata']}"
        )
    return "\n".join(lines)


class Runtime:
    def __init__(self, logger: ILogger) -> None:
        self.logger = logger

    def deserialize_cuda_engine(self, data: bytes) -> SimpleNamespace | None:
        assert data == behaviour.plan
        network = behaviour.network
        assert network is not None
        text = json.dumps({"Layers": network.compiled()})
        inspector = SimpleNamespace(get_engine_information=lambda form: text)
        engine = SimpleNamespace(create_engine_inspector=lambda: inspector)
        return engine if behaviour.loads else None
