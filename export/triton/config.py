"""Triton's model configuration, config.pbtxt, as typed objects that are checked when made.

Field names, nesting and order of meaning are those of `ModelConfig` in Triton's
model_config.proto; only the fields that Octet's entries use are here. The rules are those of
Triton's ValidateModelConfig, so a configuration that Triton refuses at start cannot be written.
Breaking a rule is a mistake of the caller and raises pydantic's ValidationError.
"""

from collections.abc import Mapping, Sequence
from dataclasses import field
from enum import Enum
from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

__all__ = [
    "All",
    "DataType",
    "DynamicBatching",
    "Graph",
    "InstanceGroup",
    "Kind",
    "Latest",
    "ModelConfig",
    "Optimization",
    "Parameter",
    "QueuePolicy",
    "Specific",
    "Tensor",
    "TimeoutAction",
    "TransactionPolicy",
    "VersionPolicy",
    "Warmup",
    "WarmupInput",
]

PLAN_PLATFORM = "tensorrt_plan"
_STRICT = ConfigDict(extra="forbid", strict=True)
_Name = Annotated[str, Field(min_length=1)]
_Count = Annotated[int, Field(ge=1)]
_Size = Annotated[int, Field(ge=0)]


class DataType(Enum):
    """Types of tensors. Triton has no 8-bit floating point; a string is bytes."""

    BOOL = "TYPE_BOOL"
    UINT8 = "TYPE_UINT8"
    UINT32 = "TYPE_UINT32"
    INT64 = "TYPE_INT64"
    FP16 = "TYPE_FP16"
    FP32 = "TYPE_FP32"
    STRING = "TYPE_STRING"


class Kind(Enum):
    """The device of an instance; MODEL leaves the choice of GPUs to the model itself."""

    CPU = "KIND_CPU"
    GPU = "KIND_GPU"
    MODEL = "KIND_MODEL"


class TimeoutAction(Enum):
    """The action on a request that waits too long."""

    REJECT = "REJECT"
    DELAY = "DELAY"


@dataclass(frozen=True, slots=True, config=_STRICT)
class Tensor:
    """An input or an output; a dimension of -1 varies. `optional` is for inputs alone."""

    name: _Name
    data_type: DataType
    dims: tuple[int, ...] = (1,)
    optional: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.dims or any(size < 1 and size != -1 for size in self.dims):
            raise ValueError(f"dims of {self.name} are {list(self.dims)}; each is 1 or more, or -1")
        return self


@dataclass(frozen=True, slots=True, config=_STRICT)
class Latest:
    num_versions: _Count = 1


@dataclass(frozen=True, slots=True, config=_STRICT)
class All:
    """Every version in the directory."""


@dataclass(frozen=True, slots=True, config=_STRICT)
class Specific:
    versions: Annotated[tuple[_Count, ...], Field(min_length=1)]


@dataclass(frozen=True, slots=True, config=_STRICT)
class VersionPolicy:
    """Selects the numbered directories that are served, by one of the three policies."""

    latest: Latest | None = None
    all: All | None = None
    specific: Specific | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if [self.latest, self.all, self.specific].count(None) != 2:
            raise ValueError("a version policy is one of latest, all and specific")
        return self


@dataclass(frozen=True, slots=True, config=_STRICT)
class TransactionPolicy:
    decoupled: bool  # any number of responses to a request


@dataclass(frozen=True, slots=True, config=_STRICT)
class InstanceGroup:
    """`count` instances on each of `gpus` (KIND_GPU without any: on every GPU).

    `profile` lists the optimization profiles of a plan that an instance may use, by number; for
    each request the instance takes the one whose optimum is nearest.
    """

    kind: Kind
    count: _Count = 1
    gpus: tuple[_Size, ...] = ()
    profile: tuple[Annotated[str, Field(pattern=r"^\d+$")], ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.gpus and self.kind is not Kind.GPU:
            raise ValueError(f"{self.kind.value} cannot name GPUs, but got {list(self.gpus)}")
        return self


@dataclass(frozen=True, slots=True, config=_STRICT)
class QueuePolicy:
    timeout_action: TimeoutAction = TimeoutAction.REJECT
    default_timeout_microseconds: _Size = 0  # 0: none
    allow_timeout_override: bool = False
    max_queue_size: _Size = 0  # 0: unlimited


@dataclass(frozen=True, slots=True, config=_STRICT)
class DynamicBatching:
    """Requests whose inputs have equal shapes are joined along the first dimension."""

    preferred_batch_size: tuple[_Count, ...] = ()
    max_queue_delay_microseconds: _Size = 0  # how long a request may wait for others
    default_queue_policy: QueuePolicy | None = None


@dataclass(frozen=True, slots=True, config=_STRICT)
class Graph:
    level: int  # the backend's own scale; ONNX Runtime: -1 basic, 0 all, 1 extended, 2 none


@dataclass(frozen=True, slots=True, config=_STRICT)
class Optimization:
    graph: Graph


@dataclass(frozen=True, slots=True, config=_STRICT)
class Parameter:
    string_value: str


@dataclass(frozen=True, slots=True, config=_STRICT)
class WarmupInput:
    """Zeros, or the content of `input_data_file` in the entry's directory `warmup`."""

    data_type: DataType
    dims: Annotated[tuple[_Count, ...], Field(min_length=1)]  # without the batch dimension
    zero_data: bool = False
    input_data_file: str = ""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.zero_data == bool(self.input_data_file):
            raise ValueError("a warm-up input is zeros or a file, one of the two")
        return self


@dataclass(frozen=True, slots=True, config=_STRICT)
class Warmup:
    """A test of an instance before it is ready: `batch_size` requests of one row at once."""

    name: _Name
    batch_size: _Count  # Triton silently skips a sample of 0
    inputs: Mapping[str, WarmupInput]
    count: _Count = 1


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class ModelConfig:
    """One entry. With `max_batch_size` 0, dims are whole shapes and Triton joins no requests."""

    name: _Name
    platform: str = ""
    backend: str = ""
    version_policy: VersionPolicy = VersionPolicy(latest=Latest())
    max_batch_size: _Size = 0
    model_transaction_policy: TransactionPolicy | None = None
    dynamic_batching: DynamicBatching | None = None
    optimization: Optimization | None = None
    instance_group: Annotated[tuple[InstanceGroup, ...], Field(min_length=1)]
    input: tuple[Tensor, ...] = ()
    output: tuple[Tensor, ...] = ()
    model_warmup: tuple[Warmup, ...] = ()
    parameters: Mapping[str, Parameter] = field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.platform) == bool(self.backend):
            raise ValueError("give platform or backend, one of the two")
        for tensors in (self.input, self.output):
            _check_unique([tensor.name for tensor in tensors])
        if any(tensor.optional for tensor in self.output):
            raise ValueError("an output cannot be optional")
        if self.platform != PLAN_PLATFORM and any(group.profile for group in self.instance_group):
            raise ValueError(f"only {PLAN_PLATFORM} has profiles")
        self._check_batching()
        for sample in self.model_warmup:
            self._check_warmup(sample)
        return self

    def _check_batching(self) -> None:
        if self.dynamic_batching is None:
            return
        if self.max_batch_size == 0:
            raise ValueError("dynamic batching needs a max_batch_size of 1 or more")
        largest = max(self.dynamic_batching.preferred_batch_size, default=0)
        if largest > self.max_batch_size:
            raise ValueError(f"preferred_batch_size {largest} is above {self.max_batch_size}")

    def _check_warmup(self, sample: Warmup) -> None:
        """Checks against the declared inputs, unless the backend declares them itself."""
        if sample.batch_size > max(self.max_batch_size, 1):
            raise ValueError(f"warm-up {sample.name}: batch_size is above {self.max_batch_size}")
        declared = {tensor.name: tensor for tensor in self.input}
        if not declared:
            return
        needed = {tensor.name for tensor in self.input if not tensor.optional}
        if missing := needed - sample.inputs.keys():
            raise ValueError(f"warm-up {sample.name} lacks input {min(missing)}")
        for name, given in sample.inputs.items():
            tensor = declared.get(name)
            fits = tensor is not None and (
                tensor.data_type is given.data_type
                and len(tensor.dims) == len(given.dims)
                and all(a in (-1, b) for a, b in zip(tensor.dims, given.dims, strict=True))
            )
            if not fits:
                raise ValueError(f"warm-up {sample.name}: {name} is not as the model declares it")


def _check_unique(names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"tensor {name} is declared twice")
