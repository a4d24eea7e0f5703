"""A stand-in for Triton's Python backend, and requests as it hands them to a model."""

import json
import threading
from typing import Any

import numpy as np

__all__ = ["InferenceResponse", "PbUtils", "Request", "Tensor", "TritonError", "string"]

FINAL = 1


class Tensor:
    def __init__(self, name: str, array: Any) -> None:
        assert isinstance(array, np.ndarray) and array.ndim == 1
        self.name, self._array = name, array

    def as_numpy(self) -> Any:
        return self._array


class TritonError(Exception):
    INTERNAL, INVALID_ARG, UNAVAILABLE, CANCELLED = "INTERNAL", "INVALID_ARG", "UNAVAILABLE", "C"

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class InferenceResponse:
    def __init__(self, tensors: list[Tensor] | None = None, error: Any = None) -> None:
        self.values = {tensor.name: tensor.as_numpy() for tensor in tensors or ()}
        self.error = error


class PbUtils:
    """What the entry uses of triton_python_backend_utils."""

    Tensor = Tensor
    TritonError = TritonError
    InferenceResponse = InferenceResponse
    TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL

    @staticmethod
    def get_input_tensor_by_name(request: "Request", name: str) -> Tensor | None:
        return request.tensors.get(name)


class Request:
    """A request and its response sender at once; keyword arguments are input tensors."""

    def __init__(self, parameters: dict[str, Any] | None = None, **inputs: Any) -> None:
        self.tensors = {name: Tensor(name, array_of(value)) for name, value in inputs.items()}
        self._parameters = json.dumps(parameters) if parameters else ""
        self.responses: list[InferenceResponse] = []
        self.final = threading.Event()
        self.gone = False  # whether the client has given up
        self.gate = threading.Event()  # while cleared, sending takes its time
        self.gate.set()
        self.refuses = False  # whether sending a response raises

    def request_id(self) -> str:
        return "r"

    def parameters(self) -> str:
        return self._parameters

    def get_response_sender(self) -> "Request":
        return self

    def is_cancelled(self) -> bool:
        return self.gone

    def send(self, response: InferenceResponse, flags: int) -> None:
        assert not self.final.is_set(), "a response after the final one"
        self.gate.wait()
        if self.refuses and response.error is None:
            raise RuntimeError("shared memory is full")
        self.responses.append(response)
        if flags == FINAL:
            self.final.set()

    def wait(self) -> "Request":
        assert self.final.wait(60), "no final response"
        return self

    @property
    def text(self) -> str:
        assert all(response.error is None for response in self.responses)
        return "".join(string(response, "text_output") for response in self.responses)

    @property
    def error(self) -> Any:
        return self.responses[-1].error


def array_of(value: Any) -> Any:
    if isinstance(value, bool):
        return np.array([value])
    if isinstance(value, list):
        return np.array(value, np.int64)
    text = json.dumps(value) if isinstance(value, dict) else value
    return np.array([text.encode() if isinstance(text, str) else text], np.object_)


def string(response: InferenceResponse, name: str) -> str:
    (value,) = response.values[name]
    return str(value.decode())
