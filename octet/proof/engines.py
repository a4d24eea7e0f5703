"""Which `ServingPath` an engine executes, as read in its source and seen on the machine.

| engine          | weights and inputs                                                           |
|-----------------|------------------------------------------------------------------------------|
| vLLM 0.24,      | FP8 per channel, tensor or block: both are rounded. MXFP8, MXFP4, NVFP4:      |
| Hopper          | weight-only (Marlin); native FP4 needs compute capability 10.0               |
| vLLM 0.32, CPU  | FP8 per channel with inputs per token: both (torch._scaled_mm). With AMX, FP8 |
|                 | per tensor and in blocks: weight-only                                        |

| engine          | cache and attention                                                          |
|-----------------|------------------------------------------------------------------------------|
| vLLM 0.24,      | rounded to nearest (`__nv_cvt_float_to_fp8`), and read beside BF16 queries    |
| FLASHINFER      |                                                                              |
| vLLM 0.24,      | no E5M2; with E4M3, queries and probabilities are rounded to E4M3 too         |
| FLASH_ATTN      |                                                                              |
| vLLM 0.32,      | truncated toward zero, E4M3 and E5M2 alike: `cpu_attn_reshape_and_cache`      |
| CPU_ATTN        | wrote the bytes of truncation for all of 16,384 normal values                |

vLLM's sources: model_executor/kernels/linear/__init__.py (`_POSSIBLE_FP8_KERNELS` and so on, tried
in order), v1/attention/backends/, csrc/cpu/cpu_attn_fp8.hpp.
"""

from typing import Literal

from octet.artifacts.serving_path import ServingPath
from octet.recipe import KvCacheDtype, TensorScheme

__all__ = ["Machine", "vllm_path"]

Machine = Literal["cpu", "sm90"]
Pair = tuple[TensorScheme, TensorScheme]  # of weights and of activations


def vllm_path(
    pair: Pair | None,
    kv_cache: KvCacheDtype,
    machine: Machine,
    *,
    attention: Literal["FLASHINFER", "FLASH_ATTN"] | None = None,
    amx: bool = False,
) -> ServingPath:
    """What vLLM does with linears of the schemes `pair` (None: all in full precision).

    `kv_cache` "float16" is vLLM's `auto`. `attention` is the backend on a GPU; by default the one
    that vLLM chooses: FLASHINFER for E5M2, else FLASH_ATTN. `amx` is of the CPU.
    """
    weights = pair is not None
    activations = pair is not None and pair[0].kind == "fp8"
    if machine == "cpu":
        if amx and pair is not None and pair[0].granularity != "channel":
            activations = False
        rounding: Literal["nearest", "truncate"] = "truncate"
        return ServingPath(
            weights=weights,
            activations=activations,
            kv_cache=kv_cache,
            kv_rounding="nearest" if kv_cache == "float16" else rounding,
        )
    return ServingPath(
        weights=weights,
        activations=activations,
        kv_cache=kv_cache,
        queries=kv_cache == "e4m3" and attention != "FLASHINFER",
    )
