"""config.pbtxt, read back by Triton's own protobuf, and what its objects refuse."""

import dataclasses
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from pydantic import ValidationError
from tritonclient.grpc import model_config_pb2

from export.triton.config import (
    All,
    DataType,
    DynamicBatching,
    Graph,
    InstanceGroup,
    Kind,
    Latest,
    ModelConfig,
    Optimization,
    Parameter,
    QueuePolicy,
    Specific,
    Tensor,
    TimeoutAction,
    TransactionPolicy,
    VersionPolicy,
    Warmup,
    WarmupInput,
)
from export.triton.config_text import pbtxt
from export.triton.entries import python_entry, vllm_entry
from export.triton.step_entries import onnxruntime_entry, plan_tensors, tensorrt_entry
from octet.model.spec import ModelSpec

SPEC = ModelSpec.model_construct(layers=2, kv_heads=3, head_dim=8, vocab_size=99)
TENSORS = plan_tensors(SPEC, "float16")
X = Tensor("x", DataType.FP32, (-1, 2))
EVERYTHING = ModelConfig(
    name="all",
    platform="tensorrt_plan",
    version_policy=VersionPolicy(specific=Specific((1, 3))),
    max_batch_size=8,
    model_transaction_policy=TransactionPolicy(decoupled=True),
    dynamic_batching=DynamicBatching(
        (2, 8), 100, QueuePolicy(TimeoutAction.DELAY, 5, allow_timeout_override=True)
    ),
    optimization=Optimization(Graph(2)),
    instance_group=(
        InstanceGroup(Kind.GPU, 2, (0, 3), ("1", "0")),
        InstanceGroup(Kind.CPU),
        InstanceGroup(Kind.MODEL, 3),
    ),
    input=(X, Tensor("o", DataType.BOOL, optional=True)),
    output=(Tensor("s", DataType.STRING), Tensor("u", DataType.UINT8, (1, 2, 3))),
    model_warmup=(
        Warmup("zeros", 2, {"x": WarmupInput(DataType.FP32, (4, 2), zero_data=True)}, 3),
        Warmup("file", 1, {"x": WarmupInput(DataType.FP32, (1, 2), input_data_file="f")}),
    ),
    parameters={"a": Parameter("b"), "": Parameter("")},
)
CONFIGS = {
    "python": python_entry("m").config,
    "python on an engine": python_entry("m", on_gpu=True, slots=4).config,
    "vllm": vllm_entry("m").config,
    "onnxruntime": onnxruntime_entry("m", *TENSORS).config,
    "tensorrt": tensorrt_entry("m", *TENSORS, max_batch=16, max_length=1024).config,
    "everything": EVERYTHING,
    "latest": dataclasses.replace(EVERYTHING, version_policy=VersionPolicy(latest=Latest(2))),
    "all": dataclasses.replace(EVERYTHING, version_policy=VersionPolicy(all=All())),
}


def parsed(config: ModelConfig) -> Any:
    """As Triton reads it: an unknown field or a misplaced value is an error."""
    return text_format.Parse(pbtxt(config), model_config_pb2.ModelConfig())


def config_of(entry: Path) -> Any:
    """The configuration of an entry that was written."""
    text = (entry / "config.pbtxt").read_text()
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def assert_same(ours: Any, message: Any, where: str = "") -> None:
    """Every field of the dataclass is in the message, and no other field is set there."""
    fields = {field.name for field in dataclasses.fields(ours)}
    assert {descriptor.name for descriptor, _ in message.ListFields()} <= fields, where
    for name in fields:
        if name not in message.DESCRIPTOR.fields_by_name:
            assert (name, getattr(ours, name)) == ("optional", False)  # which outputs do not have
            continue
        mine, theirs, path = getattr(ours, name), getattr(message, name), f"{where}.{name}"
        if mine is None:
            assert not message.HasField(name), path
        elif dataclasses.is_dataclass(mine):
            assert message.HasField(name), path
            assert_same(mine, theirs, path)
        elif isinstance(mine, Mapping):
            assert mine.keys() == theirs.keys(), path
            for key, value in mine.items():
                assert_same(value, theirs[key], f"{path}[{key!r}]")
        elif isinstance(mine, tuple) and mine and dataclasses.is_dataclass(mine[0]):
            for index, (one, other) in enumerate(zip(mine, theirs, strict=True)):
                assert_same(one, other, f"{path}[{index}]")
        elif isinstance(mine, tuple):
            assert mine == tuple(theirs), path
        elif isinstance(mine, Enum):
            kind = message.DESCRIPTOR.fields_by_name[name].enum_type
            assert mine.value == kind.values_by_number[theirs].name, path
        else:
            assert mine == theirs, path


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_triton_reads_every_field_as_it_was_meant(config: ModelConfig) -> None:
    assert_same(config, parsed(config))


def test_a_difference_in_any_field_shows() -> None:
    """The comparison above is worth something."""
    message = parsed(EVERYTHING)
    message.instance_group[0].profile[1] = "7"
    with pytest.raises(AssertionError, match="profile"):
        assert_same(EVERYTHING, message)
    message = parsed(EVERYTHING)
    message.response_cache.enable = True
    with pytest.raises(AssertionError):
        assert_same(EVERYTHING, message)


@pytest.mark.parametrize("text", ['a "quoted" \\ name', "é\n\t\x01\x7f", "x" * 200, "'"])
def test_any_text_survives(text: str) -> None:
    config = ModelConfig(
        name=text,
        backend="python",
        instance_group=(InstanceGroup(Kind.CPU),),
        parameters={text: Parameter(text), "other": Parameter("")},
    )
    assert_same(config, parsed(config))


def make(**fields: Any) -> ModelConfig:
    usual = {"name": "m", "backend": "python", "instance_group": (InstanceGroup(Kind.CPU),)}
    return ModelConfig(**usual | fields)


ZEROS = WarmupInput(DataType.FP32, (1, 2), zero_data=True)
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no name": (lambda: make(name=""), "at least 1 character"),
    "no backend": (lambda: make(backend=""), "platform or backend"),
    "both": (lambda: make(platform="tensorrt_plan"), "platform or backend"),
    "no instance": (lambda: make(instance_group=()), "at least 1 item"),
    "negative batch": (lambda: make(max_batch_size=-1), "greater than or equal to 0"),
    "text for a number": (lambda: make(max_batch_size="1"), "valid integer"),
    "unknown field": (lambda: make(max_batchsize=1), "max_batchsize"),
    "no dims": (lambda: Tensor("x", DataType.BOOL, ()), "dims of x are"),
    "a dimension of 0": (lambda: Tensor("x", DataType.BOOL, (1, 0)), r"dims of x are \[1, 0\]"),
    "twice the same input": (lambda: make(input=(X, X)), "x is declared twice"),
    "optional output": (lambda: make(output=(Tensor("x", DataType.BOOL, (1,), True),)), "output"),
    "GPUs of a CPU": (lambda: InstanceGroup(Kind.CPU, 1, (0,)), "cannot name GPUs"),
    "GPUs of the model's": (lambda: InstanceGroup(Kind.MODEL, 1, (0,)), "cannot name GPUs"),
    "no instances of a group": (lambda: InstanceGroup(Kind.CPU, 0), "greater than or equal to 1"),
    "a named profile": (lambda: InstanceGroup(Kind.GPU, profile=("decode",)), "pattern"),
    "profiles without a plan": (
        lambda: make(instance_group=(InstanceGroup(Kind.GPU, profile=("0",)),)),
        "only tensorrt_plan has profiles",
    ),
    "batching without batches": (lambda: make(dynamic_batching=DynamicBatching()), "max_batch"),
    "a batch too large": (
        lambda: make(max_batch_size=4, dynamic_batching=DynamicBatching((8,))),
        "preferred_batch_size 8 is above 4",
    ),
    "no version policy": (lambda: VersionPolicy(), "one of latest, all and specific"),
    "two version policies": (lambda: VersionPolicy(Latest(), All()), "one of latest, all"),
    "version 0": (lambda: Specific((0,)), "greater than or equal to 1"),
    "warm-up of nothing": (lambda: WarmupInput(DataType.BOOL, (1,)), "zeros or a file"),
    "warm-up of any size": (lambda: WarmupInput(DataType.BOOL, (-1,), True), "greater than"),
    "warm-up never run": (lambda: Warmup("w", 0, {}), "greater than or equal to 1"),
    "warm-up above the batch": (lambda: make(model_warmup=(Warmup("w", 2, {}),)), "batch_size"),
    "warm-up lacks an input": (
        lambda: make(input=(X,), model_warmup=(Warmup("w", 1, {}),)),
        "w lacks input x",
    ),
    "warm-up of another input": (
        lambda: make(input=(X,), model_warmup=(Warmup("w", 1, {"x": ZEROS, "y": ZEROS}),)),
        "w: y is not as the model declares",
    ),
    "warm-up of another shape": (
        lambda: make(
            input=(Tensor("x", DataType.FP32, (1, 3)),),
            model_warmup=(Warmup("w", 1, {"x": ZEROS}),),
        ),
        "w: x is not as the model declares",
    ),
}


@pytest.mark.parametrize(("build", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_triton_would_refuse_cannot_be_made(build: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        build()
