"""A TensorRT whose plans are ONNX files, run by ONNX Runtime on a `FakeGpu`'s memory.

Its classes have only what TensorRT's have, with the same parameters; tests/export/test_bindings.py
holds them against the real ones.
"""

import ctypes
import json
from collections.abc import Sequence
from enum import Enum
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto
from onnxruntime import OrtValue

from tests.serve.fake_gpu import FakeGpu

__all__ = ["VERSION", "FakeTensorRT", "plan_of"]

VERSION = "11.4.0.106"
Shape = tuple[int, ...]
Profiles = dict[str, dict[str, tuple[Shape, Shape, Shape]]]


class DataType(Enum):
    FLOAT, HALF, INT8, INT32, BOOL, UINT8, FP8, BF16, INT64 = range(9)


class TensorIOMode(Enum):
    NONE, INPUT, OUTPUT = range(3)


_DTYPES = {
    TensorProto.FLOAT: (DataType.FLOAT, np.dtype(np.float32)),
    TensorProto.FLOAT16: (DataType.HALF, np.dtype(np.float16)),
    TensorProto.INT64: (DataType.INT64, np.dtype(np.int64)),
    TensorProto.BOOL: (DataType.BOOL, np.dtype(np.bool_)),
    TensorProto.UINT8: (DataType.UINT8, np.dtype(np.uint8)),
    TensorProto.FLOAT8E4M3FN: (DataType.FP8, np.dtype(np.uint8)),  # its codes
}


def plan_of(model: onnx.ModelProto, profiles: Profiles) -> bytes:
    """What the fake takes for a plan."""
    entry = model.metadata_props.add()
    entry.key, entry.value = "profiles", json.dumps(list(profiles.values()))
    plan: bytes = model.SerializeToString()
    return plan


class ILogger:
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)

    def log(self, severity: int, msg: str) -> None:
        raise NotImplementedError


class Runtime:
    gpu: FakeGpu

    def __init__(self, logger: ILogger) -> None:
        self.logger = logger

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> "ICudaEngine | None":
        try:
            model = onnx.ModelProto.FromString(serialized_engine)
            profiles = json.loads(model.metadata_props[0].value)
        except Exception:
            self.logger.log(ILogger.ERROR, "Error Code 1:\nthe plan is damaged")
            return None
        return ICudaEngine(model, profiles, self.gpu)


class ICudaEngine:
    def __init__(self, model: onnx.ModelProto, profiles: list[Any], gpu: FakeGpu) -> None:
        self._gpu, self._profiles = gpu, profiles
        self._values = {
            value.name: (mode, value.type.tensor_type)
            for mode, values in (
                (TensorIOMode.INPUT, model.graph.input),
                (TensorIOMode.OUTPUT, model.graph.output),
            )
            for value in values
        }
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 2
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )

    @property
    def num_io_tensors(self) -> int:
        return len(self._values)

    @property
    def num_optimization_profiles(self) -> int:
        return len(self._profiles)

    def get_tensor_name(self, index: int) -> str:
        return list(self._values)[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return self._values[name][0]

    def get_tensor_dtype(self, name: str) -> DataType:
        return _DTYPES[self._values[name][1].elem_type][0]

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[Sequence[int]]:
        return [tuple(shape) for shape in self._profiles[profile_index][name]]

    def create_execution_context(self) -> "IExecutionContext":
        return IExecutionContext(self)


class IExecutionContext:
    def __init__(self, engine: ICudaEngine) -> None:
        self._engine = engine
        self._profile: int | None = None
        self._addresses: dict[str, int] = {}
        self._shapes: dict[str, Shape] = {}

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self._profile = profile_index
        return profile_index < self._engine.num_optimization_profiles

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert self._profile is not None, "no profile was chosen"
        low, _, high = self._engine.get_tensor_profile_shape(name, self._profile)
        self._shapes[name] = shape
        return len(shape) == len(low) and all(
            least <= size <= most for least, size, most in zip(low, shape, high, strict=True)
        )

    def set_tensor_address(self, name: str, memory: int) -> bool:
        assert memory and memory % 256 == 0
        self._addresses[name] = memory
        return name in self._engine._values

    def execute_async_v3(self, stream_handle: int) -> bool:
        values, gpu = self._engine._values, self._engine._gpu
        if set(values) != set(self._addresses) or gpu.status("execute_async_v3").value:
            return False
        addresses, shapes = dict(self._addresses), dict(self._shapes)

        def array(name: str, shape: Shape) -> Any:
            dtype = _DTYPES[values[name][1].elem_type][1]
            nbytes = int(np.prod(shape)) * dtype.itemsize
            return gpu.view(addresses[name], nbytes).view(dtype).reshape(shape)

        def run() -> None:
            modes = {name: mode for name, (mode, _) in values.items()}
            inputs = [name for name, mode in modes.items() if mode is TensorIOMode.INPUT]
            outputs = [name for name, mode in modes.items() if mode is TensorIOMode.OUTPUT]
            feeds = {}
            for name in inputs:
                kind = values[name][1].elem_type
                feeds[name] = OrtValue.ortvalue_from_numpy_with_onnx_type(
                    array(name, shapes[name]), kind
                )
            found = self._engine._session.run_with_ort_values(outputs, feeds)
            for name, result in zip(outputs, found, strict=True):
                to = array(name, tuple(result.shape()))
                ctypes.memmove(to.ctypes.data, result.data_ptr(), to.nbytes)

        gpu.put_off(run)
        return True


class FakeTensorRT:
    """Stands for the module; each has a GPU of its own."""

    ILogger, DataType, TensorIOMode = ILogger, DataType, TensorIOMode
    ICudaEngine, IExecutionContext = ICudaEngine, IExecutionContext

    def __init__(self, gpu: FakeGpu, version: str = VERSION) -> None:
        self.__version__ = version
        self.__name__ = "tensorrt"
        self.Runtime = type("Runtime", (Runtime,), {"gpu": gpu})
