"""Entries that run one decoder step, for clients with their own loop, cache and sampler.

  onnxruntime   the ONNX graph. Every tensor has the batch first, so dynamic batching applies: steps
                that wait while one runs are joined if their shapes are equal (equal windows).
  tensorrt      the plan, with both of its profiles. Triton's batcher is off and `dims` are whole
                shapes: it would join prompts too, but the prefill profile takes one sequence.

Inputs and outputs are those of the graph (see decoder.py and tensorrt_decoder.py in export/onnx).
Triton has no 8-bit floating point: the ONNX graph's cache is FP16; the plan's is read as UINT8
codes of E5M2, and its new rows are FP16, whose top bytes are their codes. There is no response
cache: a step's inputs, which include the KV cache, never repeat.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import TensorProto

from export.triton.config import (
    DataType,
    DynamicBatching,
    Graph,
    InstanceGroup,
    Kind,
    ModelConfig,
    Optimization,
    QueuePolicy,
    Tensor,
    Warmup,
    WarmupInput,
)
from export.triton.entries import Entry
from octet.errors import UnsupportedError
from octet.model.spec import ModelSpec

__all__ = ["GraphTensor", "onnxruntime_entry", "plan_tensors", "read_graph", "tensorrt_entry"]

BATCH = 16  # sequences in a step of the ONNX graph
QUEUE = 1024  # steps that may wait for it; more are refused at once
WARM_TOKENS, WARM_WINDOW = 16, 64
MASK_FILE = "true"  # file with the mask of a warm-up, which attends to everything

_TYPES = {
    TensorProto.BOOL: DataType.BOOL,
    TensorProto.UINT8: DataType.UINT8,
    TensorProto.INT64: DataType.INT64,
    TensorProto.FLOAT16: DataType.FP16,
    TensorProto.FLOAT: DataType.FP32,
}
# The types of the cache that a plan reads, and of the new rows that it returns.
_PLAN_CACHES = {
    "e5m2": (DataType.UINT8, DataType.FP16),
    "float16": (DataType.FP16, DataType.FP16),
}
_Shape = tuple[int | str, ...]


@dataclass(frozen=True)
class GraphTensor:
    """An input or output of the decoder; a dimension that varies has a name."""

    name: str
    data_type: DataType
    shape: _Shape

    def declared(self) -> Tensor:
        """Returns the tensor as Triton's configuration declares it; varying dimensions are -1."""
        sizes = tuple(-1 if isinstance(size, str) else size for size in self.shape)
        return Tensor(self.name, self.data_type, sizes)

    def warm(self, sizes: dict[str, int]) -> WarmupInput:
        """Returns a warm-up input of these sizes: zeros, or True for a mask."""
        dims = tuple(sizes[size] if isinstance(size, str) else size for size in self.shape)
        if self.data_type is DataType.BOOL:
            return WarmupInput(self.data_type, dims, input_data_file=MASK_FILE)
        return WarmupInput(self.data_type, dims, zero_data=True)

    def without_batch(self) -> "GraphTensor":
        return GraphTensor(self.name, self.data_type, self.shape[1:])


Tensors = Sequence[GraphTensor]


def read_graph(path: Path) -> tuple[list[GraphTensor], list[GraphTensor]]:
    """Reads an ONNX file's inputs and outputs.

    Raises UnsupportedError for a type that Triton lacks.
    """
    graph = onnx.load(path, load_external_data=False).graph
    inputs, outputs = ([_graph_tensor(v) for v in side] for side in (graph.input, graph.output))
    return inputs, outputs


def plan_tensors(spec: ModelSpec, kv_cache: str) -> tuple[list[GraphTensor], list[GraphTensor]]:
    """Returns the inputs and outputs of a plan for the model and the dtype of its cache."""
    if kv_cache not in _PLAN_CACHES:
        raise UnsupportedError(
            f"a plan with a cache of {kv_cache} has no Triton entry;"
            f" build it with --kv {' or '.join(_PLAN_CACHES)}"
        )
    past, present = _PLAN_CACHES[kv_cache]
    heads, dim, layers = spec.kv_heads, spec.head_dim, range(spec.layers)
    kinds = [f"{layer}.{kind}" for layer in layers for kind in ("key", "value")]
    inputs = [
        GraphTensor("input_ids", DataType.INT64, ("batch", "sequence")),
        GraphTensor("position_ids", DataType.INT64, ("batch", "sequence")),
        GraphTensor("attention_mask", DataType.BOOL, ("batch", 1, "sequence", "total")),
        GraphTensor("logit_positions", DataType.INT64, ("batch", "logits")),
    ]
    inputs += [
        GraphTensor(f"past_key_values.{kind}", past, ("batch", heads, "past", dim))
        for kind in kinds
    ]
    outputs = [GraphTensor("logits", DataType.FP32, ("batch", "logits", spec.vocab_size))]
    outputs += [
        GraphTensor(f"present.{kind}", present, ("batch", heads, "sequence", dim)) for kind in kinds
    ]
    return inputs, outputs


def onnxruntime_entry(name: str, inputs: Tensors, outputs: Tensors) -> Entry:
    """Returns an entry with only basic optimizations.

    From the next level on, ONNX Runtime fuses static FP8 Q/DQ into kernels that refuse it, and
    Triton's backend passes no session option that would forbid that.
    """
    inputs, outputs = ([tensor.without_batch() for tensor in side] for side in (inputs, outputs))
    config = ModelConfig(
        name=name,
        backend="onnxruntime",
        max_batch_size=BATCH,
        dynamic_batching=DynamicBatching(default_queue_policy=QueuePolicy(max_queue_size=QUEUE)),
        optimization=Optimization(Graph(-1)),
        instance_group=(InstanceGroup(Kind.CPU),),
        input=tuple(tensor.declared() for tensor in inputs),
        output=tuple(tensor.declared() for tensor in outputs),
        # A warm-up with batch_size n is n requests of one row each.
        model_warmup=(
            Warmup("prompt", 1, _warmup_step(inputs, 1, WARM_TOKENS)),
            Warmup("decode", 2, _warmup_step(inputs, 1, 1)),
        ),
    )
    return Entry(config, _warmup_files())


def tensorrt_entry(
    name: str, inputs: Tensors, outputs: Tensors, *, max_batch: int, max_length: int
) -> Entry:
    """Returns an entry with an instance on each GPU, which picks the profile that fits a request.

    `max_batch` and `max_length` are the limits that the plan was built for.
    """
    window, tokens = min(WARM_WINDOW, max_length), min(WARM_TOKENS, max_length)
    config = ModelConfig(
        name=name,
        platform="tensorrt_plan",
        instance_group=(InstanceGroup(Kind.GPU, profile=("0", "1")),),
        input=tuple(tensor.declared() for tensor in inputs),
        output=tuple(tensor.declared() for tensor in outputs),
        # Two tokens fit only the prefill profile, two sequences only the decode profile.
        model_warmup=(
            Warmup("prompt", 1, _warmup_step(inputs, 1, tokens, window)),
            Warmup("decode", 1, _warmup_step(inputs, min(2, max_batch), 1, window)),
        ),
    )
    return Entry(config, _warmup_files())


def _warmup_step(
    inputs: Tensors, batch: int, tokens: int, window: int = WARM_WINDOW
) -> dict[str, WarmupInput]:
    """Returns a step's inputs: `tokens` new tokens in each row, after `window` cached slots."""
    sizes = {"batch": batch, "sequence": tokens, "logits": 1, "past": window}
    sizes["total"] = window + tokens
    return {tensor.name: tensor.warm(sizes) for tensor in inputs}


def _warmup_files() -> dict[str, bytes]:
    """Returns the files of `warmup`: a mask that is True everywhere, for the largest step."""
    return {MASK_FILE: b"\1" * (WARM_TOKENS * (WARM_WINDOW + WARM_TOKENS))}


def _graph_tensor(value: onnx.ValueInfoProto) -> GraphTensor:
    kind = value.type.tensor_type
    if kind.elem_type not in _TYPES:
        called = TensorProto.DataType.Name(kind.elem_type)
        raise UnsupportedError(f"{value.name} is {called}, which Triton cannot carry")
    shape = tuple(dim.dim_param or dim.dim_value for dim in kind.shape.dim)
    return GraphTensor(value.name, _TYPES[kind.elem_type], shape)
