"""Triton's tensors: reads a model's signature, writes request inputs, reads response outputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2 as pb

from octet.errors import UnsupportedField
from serve.backends.bounds import MAX_ELEMENTS, MAX_TOKENS

__all__ = ["Inputs", "Outputs", "Signature", "count_in", "read_outputs", "text_in"]

# Name → the elements in order, as str, int, float or bool.
Outputs = Mapping[str, list[Any]]

_CONTENTS = {
    "BYTES": "bytes_contents",
    "BOOL": "bool_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
}
_LENGTH = Struct("<I")
_DTYPES = {
    "BOOL": "?",
    "INT32": "<i4",
    "INT64": "<i8",
    "UINT32": "<u4",
    "UINT64": "<u8",
    "FP32": "<f4",
}


@dataclass(frozen=True)
class Signature:
    """A model's inputs: name → datatype and number of dimensions, the batch's included."""

    inputs: Mapping[str, tuple[str, int]]

    @classmethod
    def of(cls, metadata: pb.ModelMetadataResponse) -> "Signature":
        return cls(
            {tensor.name: (tensor.datatype, len(tensor.shape)) for tensor in metadata.inputs}
        )

    def first(self, *names: str) -> str | None:
        """Returns the first of `names` that the model has: some inputs have older names."""
        return next((name for name in names if name in self.inputs), None)


class Inputs:
    """The inputs of one request, each with the datatype and rank that the model expects."""

    def __init__(self, message: pb.ModelInferRequest, signature: Signature) -> None:
        self._message = message
        self._signature = signature

    def __contains__(self, name: str) -> bool:
        return name in self._signature.inputs

    def add(self, name: str, *values: Any, shape: Sequence[int] = ()) -> None:
        """Writes `values`; `shape` is that of the last dimensions (default: one, of all values).

        Raises UnsupportedField for a number that the model's datatype cannot hold.
        """
        datatype, rank = self._signature.inputs[name]
        shape = shape or (len(values),)
        whole = [*[1] * (rank - len(shape)), *shape]
        tensor = self._message.inputs.add(name=name, datatype=datatype, shape=whole)
        encoded = [v.encode() if isinstance(v, str) else v for v in values]
        try:
            getattr(tensor.contents, _CONTENTS[datatype]).extend(encoded)
        except ValueError:
            raise UnsupportedField(
                f"'{name}' is out of range: the model takes {datatype}",
                param=name,
                code="unsupported_field",
            ) from None

    def add_if_known(self, name: str, value: Any) -> bool:
        """Writes `value` if the model has such an input; returns whether it has."""
        if name not in self:
            return False
        self.add(name, value)
        return True


def read_outputs(response: pb.ModelInferResponse) -> Outputs:
    """Returns the output tensors that are not empty and have a known datatype.

    Raises ValueError for more than `MAX_ELEMENTS` in one of them.
    """
    found: dict[str, list[Any]] = {}
    for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if not raw:
            continue
        if tensor.datatype == "BYTES":
            found[tensor.name] = _strings(tensor.name, raw)
        elif tensor.datatype in _DTYPES:
            _require_few(tensor.name, len(raw) // np.dtype(_DTYPES[tensor.datatype]).itemsize)
            found[tensor.name] = np.frombuffer(raw, _DTYPES[tensor.datatype]).tolist()
    return found


def count_in(outputs: Outputs, name: str, default: int) -> int:
    """Returns the number of tokens in an output; `default` if it is missing. Raises ValueError."""
    count = outputs[name][0] if outputs.get(name) else default
    if type(count) is not int or not 0 <= count < MAX_TOKENS:
        raise ValueError(f"{name} is {str(count)[:40]!r}, which is no number of tokens")
    return count


def text_in(outputs: Outputs, name: str, default: str = "") -> str:
    """Returns the text in an output; `default` if it is missing. Raises ValueError."""
    text = outputs[name][0] if outputs.get(name) else default
    if not isinstance(text, str):
        raise ValueError(f"{name} is {str(text)[:40]!r}, which is no text")
    return text


def _require_few(name: str, elements: int) -> None:
    if elements > MAX_ELEMENTS:
        raise ValueError(f"{name} has more than {MAX_ELEMENTS} elements")


def _strings(name: str, raw: bytes) -> list[str]:
    """Decodes strings: each is a little-endian u32 length, then that many bytes."""
    strings: list[str] = []
    at, size = 0, len(raw)
    while at < size:
        if len(strings) == MAX_ELEMENTS:
            _require_few(name, MAX_ELEMENTS + 1)
        start = at + 4
        at = start + _LENGTH.unpack_from(raw, at)[0] if start <= size else start
        if at > size:
            raise ValueError(f"{name} is cut off")
        strings.append(raw[start:at].decode("utf-8", "replace"))
    return strings
