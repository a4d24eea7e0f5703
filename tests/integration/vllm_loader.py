"""Run by vLLM's interpreter: loads checkpoints as vLLM does, short of choosing a kernel.

    python vllm_loader.py JOBS

JOBS is a JSON file: a list of {"checkpoint", "answer", "kv_cache_dtype", "tensor_parallel"?}. Each
model is built by vLLM's own classes, on the CPU, and its weights are loaded by its own loader; only
the choice of kernels is replaced, so that formats without a CPU kernel load too, and nothing is
processed after loading. Every parameter but a few scales is filled with 0x7F first, so
that what the checkpoint does not fill shows. Written: `answer`.json {"error": str | null}, and
`answer`.safetensors with all parameters, and as `dequantized/<module>` the weights of quantized
linears in float32, by vLLM's functions. `tensor_parallel` [size, rank] says which GPU's part.
"""

import importlib
import json
import pkgutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from safetensors.torch import save_file
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors_moe
from vllm.model_executor.layers.quantization.utils.mxfp8_utils import dequant_mxfp8_to_bf16
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import (
    break_fp4_bytes,
    dequantize_to_dtype,
)
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

# Left as vLLM makes them: what a checkpoint need not have, and what is compared while it is loaded.
_AS_MADE = ("q_scale", "k_scale", "v_scale", "prob_scale", "zero_point", "_input_scale")


def main() -> None:
    for job in json.loads(Path(sys.argv[1]).read_text()):
        error, tensors = None, {}
        try:
            tensors = load(job)
        except (AssertionError, KeyError, NotImplementedError, RuntimeError, ValueError) as caught:
            error = f"{type(caught).__name__}: {caught}"
        save_file(tensors, f"{job['answer']}.safetensors")
        Path(f"{job['answer']}.json").write_text(json.dumps({"error": error}))


def load(job: dict[str, Any]) -> dict[str, torch.Tensor]:
    size, rank = job.get("tensor_parallel", (1, 0))
    arguments = EngineArgs(
        model=job["checkpoint"],
        dtype="bfloat16",
        kv_cache_dtype=job["kv_cache_dtype"],
        max_model_len=64,
        enforce_eager=True,
    )
    config = arguments.create_engine_config()
    with set_current_vllm_config(config), distributed(), without_kernels():
        group = parallel_state.get_tp_group()
        config.parallel_config.tensor_parallel_size = size
        with (
            patch.object(group, "world_size", size),
            patch.object(group, "rank_in_group", rank),
            set_default_torch_dtype(torch.bfloat16),
        ):
            model = initialize_model(vllm_config=config)
            for name, parameter in model.named_parameters():
                if not name.endswith(_AS_MADE):
                    parameter.data.view(torch.uint8).fill_(0x7F)
            loader = get_model_loader(config.load_config)
            loader.load_weights(model, config.model_config)
    found = {name: x.data.contiguous().clone() for name, x in model.named_parameters()}
    for name, module in model.named_modules() if size == 1 else ():
        weight = dequantized(dict(module.named_parameters(recurse=False)))
        if weight is not None:
            found[f"dequantized/{name}"] = weight.contiguous()
    return found


def dequantized(own: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """float32 [N, K] of a linear's parameters; None for what is not quantized, and for experts."""
    scale = own.get("weight_scale", own.get("weight_scale_inv"))
    if scale is None:
        return None
    if "weight_global_scale" in own:  # compressed-tensors: a divisor
        shared = 1.0 / own["weight_global_scale"].max()
        return dequantize_to_dtype(
            own["weight_packed"], scale, shared, torch.float32, swizzle=False
        )
    if "weight_scale_2" in own:  # ModelOpt: a multiplier
        shared = own["weight_scale_2"].max()
        return dequantize_to_dtype(own["weight"], scale, shared, torch.float32, swizzle=False)
    if "weight_packed" in own:
        values = break_fp4_bytes(own["weight_packed"], torch.float32)
        factor = torch.exp2(scale.float() - 127).repeat_interleave(32, 1)
        return values * factor
    if scale.dtype == torch.uint8:
        return dequant_mxfp8_to_bf16(own["weight"], scale).float()
    values = own["weight"].float()
    if scale.ndim == 4:  # ModelOpt's blocks
        scale = scale.squeeze(3).squeeze(1)
    if scale.numel() == 1 or (scale.ndim == 1 and len(scale) < len(values)):
        return values * scale.max()  # the parts of a fused linear share it
    if scale.ndim == 1 or (scale.shape[1] == 1 and len(scale) == len(values)):
        return values * scale.reshape(-1, 1)
    rows = scale.repeat_interleave(128, 0)[: values.shape[0]]
    return values * rows.repeat_interleave(128, 1)[:, : values.shape[1]]


@contextmanager
def distributed() -> Iterator[None]:
    """The process as a group of one; a mixture of experts has groups of its own."""
    with tempfile.TemporaryDirectory() as directory:
        parallel_state.init_distributed_environment(
            1, 0, f"file://{directory}/store", local_rank=0, backend="gloo"
        )
        parallel_state.ensure_model_parallel_initialized(1, 1)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


@contextmanager
def without_kernels() -> Iterator[None]:
    """Whatever chooses a kernel gets one that does nothing."""
    linear: Callable[..., Any] = lambda *_, **__: MagicMock()  # noqa: E731
    experts: Callable[..., Any] = lambda *_, **__: (MagicMock(), MagicMock())  # noqa: E731
    for found in pkgutil.iter_modules(compressed_tensors_moe.__path__):  # else imported too late
        with suppress(ImportError):  # one is for ROCm alone
            importlib.import_module(f"{compressed_tensors_moe.__name__}.{found.name}")
    patches = []
    for name, module in list(sys.modules.items()):
        if not name.startswith("vllm.model_executor.layers.quantization"):
            continue
        for attribute in dir(module):
            if attribute.startswith("init_") and attribute.endswith("_linear_kernel"):
                patches.append(patch.object(module, attribute, linear))
            elif attribute.startswith("select_") and attribute.endswith("_moe_backend"):
                patches.append(patch.object(module, attribute, experts))
    for item in patches:
        item.start()
    try:
        yield
    finally:
        for item in patches:
            item.stop()


if __name__ == "__main__":
    main()
