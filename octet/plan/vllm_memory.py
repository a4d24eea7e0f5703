"""Predicts how vLLM divides a GPU's memory, and the number of KV-cache blocks that it reports.

vLLM 0.24 (`Worker.determine_available_memory`) gives to the cache what remains of

    memory * gpu_memory_utilization - weights - activations - CUDA graphs - other

where it measures the last four in a trial run of `max_num_batched_tokens` tokens, and rounds down
to blocks of 16 tokens. Weights are exact here. The others are modelled after vLLM's source, and
`benchmarks/plan_check.py` compares the result with vLLM.
"""

import math
from dataclasses import dataclass

from octet.plan.sizes import Sizes
from octet.recipe import KvCacheDtype

__all__ = [
    "BLOCK",
    "GIB",
    "UTILIZATION",
    "Engine",
    "Memory",
    "default_batched_tokens",
    "divide",
    "usable_memory",
]

BLOCK = 16  # tokens of a block, with FlashAttention and FlashInfer
UTILIZATION = 0.92  # vLLM's default
GIB = 1 << 30

# Architectures that vLLM 0.24 runs with its second model runner, which samples in fewer buffers and
# does not count CUDA graphs (DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES in vllm/config/vllm.py).
_SECOND_RUNNER = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM")
# Bytes of each logit while it samples. First runner: BF16, FP32, probabilities and noise. Second:
# BF16 and FP32.
_LOGIT_BYTES = {False: 14, True: 6}
_DRIVER = 512 << 20  # bytes that the driver keeps, see `usable_memory`
_OTHER = 600 << 20  # bytes of CUDA modules and libraries, which are not allocated by torch
_GRAPHS = 400 << 20  # bytes of CUDA graphs, of up to 86 batch sizes


@dataclass(frozen=True)
class Engine:
    """The settings of `vllm serve` that decide about memory."""

    tensor_parallel: int
    max_num_seqs: int
    max_num_batched_tokens: int
    utilization: float = UTILIZATION


@dataclass(frozen=True)
class Memory:
    """The memory of each GPU in bytes; `cache` is what remains, and negative if nothing does."""

    weights: int
    activations: int
    graphs: int
    other: int
    cache: int
    token_bytes: int  # of one token in the cache

    @property
    def blocks(self) -> int:
        """The KV-cache blocks: vLLM's num_gpu_blocks."""
        return max(0, self.cache // (BLOCK * self.token_bytes))

    @property
    def tokens(self) -> int:
        """The tokens that the cache holds."""
        return BLOCK * self.blocks


def usable_memory(memory: int) -> int:
    """Returns the bytes that CUDA can allocate of a GPU's `memory`, its size in nvidia-smi.

    The driver keeps 0.4 to 0.7 GiB: CUDA has 79.2 of an H100's 79.65 GiB, and 139.8 of an H200's
    140.4 GiB.
    """
    return memory - _DRIVER


def default_batched_tokens(memory: int, name: str) -> int:
    """Returns the max_num_batched_tokens of `vllm serve` on a GPU with `memory` bytes."""
    return 8192 if memory >= 70 * GIB and "a100" not in name.lower() else 2048


def divide(sizes: Sizes, kv_cache: KvCacheDtype, engine: Engine, memory: int) -> Memory:
    """Divides the `memory` in bytes of each of the GPUs that share the model."""
    weights = sizes.gpu_bytes(engine.tensor_parallel)
    second = sizes.spec.architecture in _SECOND_RUNNER
    activations = max(_forward(sizes, engine), _sampling(sizes, engine, second))
    graphs = 0 if second else _GRAPHS
    requested = math.ceil(memory * engine.utilization)
    return Memory(
        weights=weights,
        activations=activations,
        graphs=graphs,
        other=_OTHER,
        cache=requested - weights - activations - graphs - _OTHER,
        token_bytes=sizes.cache_bytes(kv_cache, engine.tensor_parallel),
    )


def _forward(sizes: Sizes, engine: Engine) -> int:
    """Returns the most bytes that live at once in a forward pass of the largest batch.

    They live where the MLP's activation is computed: gate and up, their product, and the residual
    stream. Of a sparse layer, vLLM's fused experts hold gate and up, then the product, then the
    outputs, once for each chosen expert.
    """
    spec, degree = sizes.spec, engine.tensor_parallel
    inner = 3 * spec.intermediate_size // degree
    if spec.sparse_layers:
        chosen = spec.experts_per_token
        wide = max(2 * spec.moe_intermediate_size // degree, spec.hidden_size)
        experts = chosen * (wide + spec.moe_intermediate_size // degree)
        inner = max(inner if len(spec.sparse_layers) < spec.layers else 0, experts)
    return 2 * engine.max_num_batched_tokens * (inner + 2 * spec.hidden_size)


def _sampling(sizes: Sizes, engine: Engine, second: bool) -> int:
    """Returns the bytes that live while one token is sampled for each sequence."""
    sequences = min(engine.max_num_seqs, engine.max_num_batched_tokens)
    hidden = 2 * engine.max_num_batched_tokens * sizes.spec.hidden_size
    return sequences * sizes.spec.vocab_size * _LOGIT_BYTES[second] + hidden
