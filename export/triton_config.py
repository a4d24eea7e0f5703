"""config.pbtxt: what Triton must know of a model, as typed objects and as protobuf's text format.

Field names and meanings are those of `ModelConfig` in Triton's model_config.proto.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

__all__ = [
    "DataType",
    "InstanceGroup",
    "Kind",
    "ModelConfig",
    "Parameter",
    "Tensor",
    "TransactionPolicy",
]

WIDTH = 100


class DataType(Enum):
    """Types of the tensors that our entries exchange; a string is bytes of any length."""

    BOOL = "TYPE_BOOL"
    INT64 = "TYPE_INT64"
    STRING = "TYPE_STRING"
    UINT32 = "TYPE_UINT32"


class Kind(Enum):
    """Where an instance runs; MODEL leaves the choice of GPUs to the model itself."""

    CPU = "KIND_CPU"
    MODEL = "KIND_MODEL"


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input or an output; a dimension of -1 varies. `optional` is for inputs alone."""

    name: str
    data_type: DataType
    dims: tuple[int, ...] = (1,)
    optional: bool = False


@dataclass(frozen=True, slots=True)
class TransactionPolicy:
    decoupled: bool  # any number of responses to a request


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    kind: Kind
    count: int = 1


@dataclass(frozen=True, slots=True)
class Parameter:
    string_value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoupled model that batches by itself, so that Triton's batcher is off (size 0)."""

    name: str
    backend: str
    max_batch_size: int = 0
    model_transaction_policy: TransactionPolicy = TransactionPolicy(decoupled=True)
    instance_group: tuple[InstanceGroup, ...]
    input: tuple[Tensor, ...] = ()
    output: tuple[Tensor, ...] = ()
    parameters: Mapping[str, Parameter] = dataclasses.field(default_factory=dict)

    def pbtxt(self) -> str:
        """The content of config.pbtxt."""
        return "".join(f"{line}\n" for line in _message(self))


def _message(message: Any) -> Iterator[str]:
    """Lines of a dataclass's fields; what is False or empty is left out, as protobuf's default."""
    for field in dataclasses.fields(message):
        value = getattr(message, field.name)
        if value is False or value == () or value == {}:
            continue
        if isinstance(value, Mapping):
            for key, item in value.items():
                yield from _block(field.name, [f"key: {_scalar(key)}", *_field("value", item)])
        elif isinstance(value, tuple) and dataclasses.is_dataclass(value[0]):
            for item in value:
                yield from _field(field.name, item)
        else:
            yield from _field(field.name, value)


def _field(name: str, value: Any) -> Iterator[str]:
    if dataclasses.is_dataclass(value):
        return _block(name, list(_message(value)))
    return iter([f"{name}: {_scalar(value)}"])


def _block(name: str, lines: Sequence[str]) -> Iterator[str]:
    """A message on one line if it fits."""
    inline = f"{name} {{ {' '.join(lines)} }}"
    if len(inline) <= WIDTH:
        yield inline
        return
    yield f"{name} {{"
    for line in lines:
        yield f"  {line}"
    yield "}"


def _scalar(value: Any) -> str:
    match value:
        case Enum():
            return str(value.value)
        case bool():
            return "true" if value else "false"
        case str():
            return json.dumps(value, ensure_ascii=False)  # protobuf has all of JSON's escapes
        case tuple():
            return f"[ {', '.join(map(_scalar, value))} ]"
        case _:
            return str(value)
