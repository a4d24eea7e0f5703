"""vLLM without a server, as benchmarks run it in a process of its own."""

from typing import Any

__all__ = ["ENVIRONMENT", "engine"]

# DeepGEMM compiles its kernels from headers that not every installation of vLLM brings along.
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_USE_DEEP_GEMM": "0"}


def engine(checkpoint: str, cache: str, *, memory: float, **settings: Any) -> Any:
    """An `LLM` without the prefix cache, which would answer for the kernels; `memory` of the GPU's
    is its share."""
    from vllm import LLM

    return LLM(
        checkpoint,
        kv_cache_dtype=cache,
        max_model_len=1024,
        enforce_eager=True,
        enable_prefix_caching=False,
        gpu_memory_utilization=memory,
        seed=0,
        **settings,
    )
