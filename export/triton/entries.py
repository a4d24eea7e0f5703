"""Entries that take and return text: their Triton configuration and their warm-up.

Both are decoupled (any number of responses to a request) and batch by themselves, so Triton's
batcher is off:
  python  the embedded engine, over the ONNX export or a TensorRT engine
  vllm    vLLM, by Triton's own backend for it
Neither has a response cache: Triton has none for decoupled models.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from export.triton.config import (
    DataType,
    InstanceGroup,
    Kind,
    ModelConfig,
    Parameter,
    Tensor,
    TransactionPolicy,
    Warmup,
    WarmupInput,
)
from octet.errors import UnsupportedError
from octet.model.spec import ModelSpec

__all__ = ["SLOTS", "Entry", "Tuning", "python_entry", "vllm_engine", "vllm_entry"]

SLOTS = 16  # requests that the embedded engine decodes together
WARM_TOKENS = 16  # length of the warm-up prompts

_VLLM_CACHE = {"e5m2": "fp8_e5m2", "e4m3": "fp8_e4m3", "float16": "auto"}
_WARM_SAMPLING = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
_DECOUPLED = TransactionPolicy(decoupled=True)


@dataclass(frozen=True)
class Entry:
    """A configuration, and the files of `warmup` that it names."""

    config: ModelConfig
    warmup: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Tuning:
    """Settings of Triton that replace an entry's defaults; None and () keep the defaults."""

    instances: int | None = None  # on each device
    queue_delay_us: int | None = None  # how long a request may wait to be batched with others
    preferred_batches: tuple[int, ...] = ()

    def applied(self, config: ModelConfig) -> ModelConfig:
        """Returns the configuration with these settings.

        Raises UnsupportedError if the entry batches by itself, or has one instance by design.
        """
        if self.instances is not None:
            if any(group.kind is Kind.MODEL for group in config.instance_group):
                raise UnsupportedError("--instances: vLLM's entry has one; start more servers")
            groups = tuple(replace(one, count=self.instances) for one in config.instance_group)
            config = replace(config, instance_group=groups)
        if self.queue_delay_us is None and not self.preferred_batches:
            return config
        batching = config.dynamic_batching
        if batching is None:
            raise UnsupportedError(
                "--queue-delay and --preferred-batch: only the entry of --backend onnxruntime"
                " leaves batching to Triton"
            )
        if (largest := max(self.preferred_batches, default=0)) > config.max_batch_size:
            raise UnsupportedError(
                f"--preferred-batch {largest}: the entry takes {config.max_batch_size} at most"
            )
        delay = batching.max_queue_delay_microseconds
        batching = replace(
            batching,
            preferred_batch_size=self.preferred_batches or batching.preferred_batch_size,
            max_queue_delay_microseconds=delay
            if self.queue_delay_us is None
            else self.queue_delay_us,
        )
        return replace(config, dynamic_batching=batching)


def python_entry(
    name: str, *, on_gpu: bool = False, slots: int = SLOTS, context: int = 1024
) -> Entry:
    """Returns the embedded engine's entry, with its `slots` and `threads` (0: one per core).

    `context` limits the tokens of prompt and answer together. On GPUs, each GPU has an engine with
    its own cache.
    """
    flag, text = DataType.BOOL, DataType.STRING
    inputs = {
        "input_ids": WarmupInput(DataType.INT64, (min(WARM_TOKENS, context - 1),), zero_data=True),
        "sampling_parameters": WarmupInput(text, (1,), input_data_file="sampling_parameters"),
    }
    config = ModelConfig(
        name=name,
        backend="python",
        model_transaction_policy=_DECOUPLED,
        instance_group=(InstanceGroup(Kind.GPU if on_gpu else Kind.CPU),),
        input=(
            Tensor("text_input", text, optional=True),
            Tensor("input_ids", DataType.INT64, (-1,), optional=True),
            Tensor("stream", flag, optional=True),
            Tensor("sampling_parameters", text, optional=True),
            Tensor("exclude_input_in_output", flag, optional=True),
            Tensor("return_finish_reason", flag, optional=True),
            Tensor("return_logprobs", flag, optional=True),
            Tensor("return_num_input_tokens", flag, optional=True),
            Tensor("return_num_output_tokens", flag, optional=True),
        ),
        output=(
            Tensor("text_output", text, (-1,)),
            Tensor("finish_reason", text, (-1,)),
            Tensor("stop_reason", text, (-1,)),
            Tensor("logprobs", text, (-1,)),
            Tensor("num_input_tokens", DataType.UINT32),
            Tensor("num_output_tokens", DataType.UINT32, (-1,)),
        ),
        model_warmup=(Warmup("a short answer", 1, inputs),),
        parameters={"slots": Parameter(str(slots)), "threads": Parameter("0")},
    )
    return Entry(config, {"sampling_parameters": string(json.dumps(_WARM_SAMPLING))})


def vllm_entry(name: str) -> Entry:
    """Returns the entry of Triton's vLLM backend, which declares its tensors itself.

    1/model.py loads the backend. `backend: "vllm"` would not read 1/model.py, and vLLM would look
    for the checkpoint in the directory where tritonserver was started.
    """
    files = {"text_input": string("a"), "sampling_parameters": string(json.dumps(_WARM_SAMPLING))}
    inputs = {file: WarmupInput(DataType.STRING, (1,), input_data_file=file) for file in files}
    config = ModelConfig(
        name=name,
        backend="python",
        model_transaction_policy=_DECOUPLED,
        instance_group=(InstanceGroup(Kind.MODEL),),
        model_warmup=(Warmup("a short answer", 1, inputs),),
    )
    return Entry(config, files)


def vllm_engine(checkpoint: str, spec: ModelSpec, kv_cache: str) -> dict[str, Any]:
    """Returns vLLM's AsyncEngineArgs for a checkpoint that Octet exported."""
    engine = {
        "model": checkpoint,
        "dtype": "auto",
        "kv_cache_dtype": _VLLM_CACHE[kv_cache],
        "max_model_len": spec.max_positions,
        "gpu_memory_utilization": 0.9,
    }
    if kv_cache == "e5m2":
        # The only attention backend on CUDA for E5M2: others fail an assertion, or store E4M3.
        engine["attention_backend"] = "FLASHINFER"
    return engine


def string(text: str) -> bytes:
    """Encodes a string as Triton reads it from a file of `warmup`: its length first."""
    encoded = text.encode()
    return struct.pack("<I", len(encoded)) + encoded
