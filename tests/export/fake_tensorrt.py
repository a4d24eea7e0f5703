"""A TensorRT-RTX that compiles nothing: what a test sets decides what it accepts and says."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx

__version__ = "0.0.fake"


class ILogger:
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)

    def log(self, severity: int, message: str) -> None:
        raise NotImplementedError


class IProgressMonitor:
    pass


class Behaviour:
    """What the next build does; `says` is logged by the builder, `step` is its only step."""

    def __init__(self) -> None:
        self.says: list[tuple[int, str]] = []
        self.parser_errors: list[str] = []
        self.capabilities = True
        self.step: Any = lambda monitor: monitor.step_complete("Building", 0)
        self.plan: bytes | None = b"plan"
        self.profiles: list[dict[str, Any]] = []


behaviour = Behaviour()
NetworkDefinitionCreationFlag = SimpleNamespace(STRONGLY_TYPED=0)
MemoryPoolType = SimpleNamespace(WORKSPACE=0)
ComputeCapability = SimpleNamespace(SM89=89, SM120=120)
LayerType = SimpleNamespace(SHUFFLE=0, CAST=1, DEQUANTIZE=2, MATRIX_MULTIPLY=3)
DataType = SimpleNamespace(FP8=0)


class Config:
    num_compute_capabilities = 0
    progress_monitor: Any = None

    def set_memory_pool_limit(self, pool: int, size: int) -> None:
        pass

    def set_compute_capability(self, capability: int, index: int) -> bool:
        assert index < self.num_compute_capabilities
        return behaviour.capabilities

    def add_optimization_profile(self, profile: "Profile") -> int:
        behaviour.profiles.append(profile.shapes)
        return len(behaviour.profiles) - 1


class Profile:
    def __init__(self) -> None:
        self.shapes: dict[str, Any] = {}

    def set_shape(self, name: str, *shapes: tuple[int, ...]) -> None:
        self.shapes[name] = shapes


class Network:
    num_layers = 0

    def __init__(self) -> None:
        self.inputs: list[str] = []

    @property
    def num_inputs(self) -> int:
        return len(self.inputs)

    def get_input(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(name=self.inputs[index])


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
        model = onnx.load(Path(path), load_external_data=False)
        self.network.inputs = [value.name for value in model.graph.input]
        return not behaviour.parser_errors


class Builder:
    def __init__(self, logger: ILogger) -> None:
        self.logger = logger

    def create_network(self, flags: int) -> Network:
        assert flags == 1, "strongly typed"
        return Network()

    def create_builder_config(self) -> Config:
        return Config()

    def create_optimization_profile(self) -> Profile:
        return Profile()

    def build_serialized_network(self, network: Network, config: Config) -> bytes | None:
        monitor = config.progress_monitor
        monitor.phase_start("Building", None, 2)
        for severity, message in behaviour.says:
            self.logger.log(severity, message)
        going_on = behaviour.step(monitor)
        monitor.phase_finish("Building")
        return behaviour.plan if going_on else None
