"""Compares float32 GEMMs on BF16 tensor cores with cuBLAS's float32 GEMMs: errors and times.

Shapes are those of linears in 8B and 70B Llama models, for a decode step of 64 prompts and for
prefill. Errors are relative to Σ|x·w|, against float64. Needs an NVIDIA GPU.

    python benchmarks/split_matmul.py [--output FILE]
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from card import conditions, report

from calibrate.decoder import split_matmul
from calibrate.decoder.split_matmul import split_linear

SHAPES = [(64, 14336, 4096), (4096, 14336, 4096), (4096, 4096, 14336)]
SHAPES += [(64, 28672, 8192), (4096, 28672, 8192), (4096, 8192, 28672)]  # rows, outputs, terms
ROUNDS = 7
CHECKED = 64  # rows that are compared with float64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--terms", type=int, nargs="*", default=[split_matmul._TERMS])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = []
    for count, outputs, terms in SHAPES:
        torch.manual_seed(0)
        x = torch.randn(count, terms, device="cuda")
        stored = torch.randn(outputs, terms, device="cuda").mul_(0.02).bfloat16()
        wide = stored.float()
        for name, weight in (("BF16", stored), ("float32", wide * 1.1)):
            ways = {"cuBLAS float32": (0, partial(cublas, x, weight))}
            for most in options.terms:
                ways[f"split, {most} terms"] = (most, partial(split_linear, x, weight))
            for way, (most, compute) in ways.items():
                split_matmul._TERMS = most or split_matmul._TERMS
                row = {"rows": count, "outputs": outputs, "terms": terms, "weight": name}
                rows.append(row | {"way": way} | measure(compute, x, weight))
    report("split_matmul", conditions(gpu=torch.cuda.get_device_name()), rows, options.output)


def cublas(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight.float())


@torch.inference_mode()
def measure(
    compute: Callable[[], torch.Tensor], x: torch.Tensor, weight: torch.Tensor
) -> dict[str, Any]:
    found = compute()[:CHECKED].double()
    some, wide = x[:CHECKED].double(), weight.double()
    error = (found - some @ wide.T).abs() / (some.abs() @ wide.abs().T)
    times = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        compute()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return {
        "largest error": float(error.max()),
        "rms error": float(error.square().mean().sqrt()),
        "ms": statistics.median(times),
    }


if __name__ == "__main__":
    main()
