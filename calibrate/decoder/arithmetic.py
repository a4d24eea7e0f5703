"""Chooses how a model is computed: by which instructions and library, on how many threads.

A CPU with BF16 dot products (AVX512-BF16, AMX) multiplies bfloat16 several times as fast as
float32. Without them torch multiplies bfloat16 ten times slower than float32. The product of two
BF16 values is exact in float32, so a float32 matmul whose result is rounded to BF16 is what the
hardware computes, up to the order in which it adds. `benchmarks/cpu_arithmetic.py` measures what
that changes.

Torch computes float32 linears with MKL, which leaves AVX-512 unused on AMD's CPUs. oneDNN, which
is in torch too, uses it. On a GPU, float32 linears run on its BF16 tensor cores, without TF32.
"""

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, wraps
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from calibrate.decoder.split_matmul import split_linear
from octet.errors import ConfigError
from octet.hardware.cores import THREADS, chosen_threads, idle_cores, usable_cores

__all__ = [
    "BF16_SETTING",
    "Bf16",
    "Float32Linear",
    "bf16_matmuls",
    "fast_matmuls",
    "fit_threads",
    "linear",
    "stock_linears",
]

Bf16 = Literal["hardware", "float32"]
F = TypeVar("F", bound=Callable[..., Any])

BF16_SETTING = "OCTET_BF16"  # environment variable that overrides the choice

_MATMULS = {
    *(functional.linear, functional.scaled_dot_product_attention, torch.einsum),
    *(torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm),
    *(torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.mm, torch.Tensor.bmm),
    *(getattr(functional, name) for name in ("grouped_mm",) if hasattr(functional, name)),
    *(getattr(torch, name) for name in ("_grouped_mm",) if hasattr(torch, name)),
}
_ONEDNN = hasattr(torch.ops.mkldnn, "_linear_pointwise")
_ROUNDS = 8  # of matmuls in the probe, a few milliseconds each
_FASTER = 0.9  # fewer threads are chosen if they take less than this share of the time


@cache
def bf16_matmuls() -> Bf16:
    """Returns how to multiply bfloat16 on this CPU: OCTET_BF16 if it is set, else the faster way.

    Raises ConfigError for a setting that is neither "hardware" nor "float32".
    """
    chosen = os.environ.get(BF16_SETTING, "")
    if chosen in ("hardware", "float32"):
        return cast(Bf16, chosen)
    if chosen:
        raise ConfigError(f"{BF16_SETTING}={chosen}: give 'hardware' or 'float32', or leave it out")
    instructions = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    # ONEDNN_MAX_CPU_ISA may forbid oneDNN to use them.
    if instructions and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "hardware"
    return "float32"


def fast_matmuls(model: Any) -> Any:
    """Returns `model`, changed to use the fastest matmuls for its dtype.

    bfloat16: linears, attention and experts as `bf16_matmuls` chooses, in the model's `forward` and
    its decoder's. float32: linears by `linear`.
    """
    if model.dtype == torch.bfloat16 and bf16_matmuls() == "float32":
        for module in {model, model.base_model}:
            module.forward = _in_float32(module.forward)
    if model.dtype == torch.float32:
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = Float32Linear
    return model


def stock_linears(model: Any) -> Any:
    """Returns `model` with torch's own linears again, for a library that checks for their class."""
    fast: list[Any] = [module for module in model.modules() if type(module) is Float32Linear]
    for module in fast:
        module.__class__ = nn.Linear
    return model


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes `torch.nn.functional.linear`, in float32 by what is fastest there.

    On a CPU that is oneDNN, on a GPU `calibrate.decoder.split_matmul`, for which `weight` may also
    be bfloat16. `x` [..., K], `weight` [N, K], `bias` [N] → [..., N].
    """
    if x.is_cuda and x.dtype == torch.float32 and not torch.is_grad_enabled():
        return split_linear(x, weight, bias)
    together = x.dtype == weight.dtype == torch.float32 and x.is_cpu and weight.is_cpu
    if together and _ONEDNN and x.numel() and not torch.is_grad_enabled():
        return cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], ""))
    return functional.linear(x, weight, bias)


class Float32Linear(nn.Linear):
    """A linear of a float32 model; its weight may be bfloat16 on a GPU.

    A `scale`, float32 [] or [N, 1], multiplies the weight.
    """

    scale: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        if self.scale is None:
            return linear(input, self.weight, self.bias)
        found = linear(input, self.weight).mul_(self.scale.flatten())
        return found if self.bias is None else found.add_(self.bias)


def fit_threads(recorded: int | None = None) -> None:
    """Sets the number of torch's threads; a command calls it once.

    It is the number of usable cores. If other processes keep cores busy, a probe halves it for as
    long as that is faster. A continued run uses the `recorded` number, because another one changes
    the last bits of its results. OMP_NUM_THREADS overrides both.
    """
    torch.set_num_threads(_chosen(recorded))


def _chosen(recorded: int | None) -> int:
    count = usable_cores()
    if recorded is not None and chosen_threads() is None:
        return recorded
    # Processes of torchrun, which sets the variable, must agree: none probes for itself.
    if os.environ.get(THREADS) or count == 1 or idle_cores() > count - 0.5:
        return count
    taken_s = _probe(count)
    while count > 1 and (fewer_s := _probe(count // 2)) < _FASTER * taken_s:
        count, taken_s = count // 2, fewer_s
    return count


def _probe(count: int) -> float:
    """Times a few matmuls of a small model's size on `count` threads; returns seconds."""
    torch.set_num_threads(count)
    x, weight = torch.ones(512, 256), torch.ones(1024, 256)
    functional.linear(x, weight)  # starts the threads
    started = time.perf_counter()
    for _ in range(_ROUNDS):
        functional.linear(x, weight)
    return time.perf_counter() - started


def _in_float32(forward: F) -> F:
    """Wraps `forward` to compute each bfloat16 matmul on a CPU in float32, and round it."""

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = (x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
        with _Float32Matmuls() if any(x.is_cpu for x in given) else nullcontext():
            return forward(*args, **kwargs)

    return cast(F, run)


class _Float32Matmuls(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function not in _MATMULS:
            return function(*args, **kwargs)
        wide_args = [_widened(x) for x in args]
        wide_kwargs = {name: _widened(x) for name, x in kwargs.items()}
        found = function(*wide_args, **wide_kwargs)
        return found if all(map(_same, wide_args, args)) else found.bfloat16()


def _widened(x: Any) -> Any:
    if isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16 and x.is_cpu:
        return x.float()
    return x


def _same(x: Any, y: Any) -> bool:
    return x is y
