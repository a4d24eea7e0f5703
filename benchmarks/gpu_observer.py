"""Measures exact histograms on a GPU, beside an absmax hook and ModelOpt's max calibration.

The claim it checks: observing every distinct linear input, K and V costs at most 2 % over the bare
forward pass. A round runs the same batches bare, then observed, bare, absmax, bare, ModelOpt and
bare again, so that a change of clocks meets all of them; a figure is the median over rounds of each
pass over the mean of its two bare neighbours, with the interval of order statistics that holds the
median in at least 95 % of runs. `noise` is the same for a bare pass among bare neighbours.

The bare pass is the decoder without its logits, as calibration runs it. `absmax` is
`x.abs().amax()` of the same tensors, kept on the GPU. ModelOpt's FP8 max calibration watches its
default tensors, which are linear inputs (those of q, k and v apart) and weights, without K and V;
its conversion of the model is timed apart, as is reading the finished histograms to the host.
Weights are random BF16, made on the GPU.

    python benchmarks/gpu_observer.py [--shape llama-8b] [--output FILE]
"""

import argparse
import contextlib
import copy
import io
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from card import conditions, report
from numpy.typing import NDArray
from observing import observing
from transformers import LlamaConfig, LlamaForCausalLM

from calibrate.observe.channel_squares import SumOfSquares
from calibrate.observe.counting_cpu import make_counter
from calibrate.observe.observer import check_totals, observations_of
from calibrate.samples.batches import Batch
from octet.model.spec import ModelSpec

# The published shapes of Llama-3-8B and Llama-3.2-3B.
SHAPES = {
    "llama-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128_256,
    },
    "llama-3b": {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128_256,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, action="append", help="all if not given")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sample")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=300, help="per shape; then rounds end")
    parser.add_argument("--modelopt", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    shapes = options.shape or list(SHAPES)
    card = conditions(
        gpu=torch.cuda.get_device_name(),
        cuda=torch.version.cuda,
        modelopt=modelopt_version() if options.modelopt else None,
        workload=f"{options.samples} x {options.length} random tokens,"
        f" batches of {options.batch_size}, bfloat16, attention of torch (sdpa)",
        shapes={shape: SHAPES[shape] for shape in shapes},
        figures="seconds are medians; overheads are medians over rounds of a pass over the mean of"
        " its bare neighbours, in %, with an order-statistic interval of at least 95 %",
    )
    rows = [row for shape in shapes for row in measure(shape, options)]
    report("gpu_observer", card, rows, options.output)


def measure(shape: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    model, spec = build(shape)
    batches = random_batches(options)
    runs = {"observed": observed(model, spec, batches), "absmax": absmax(model, spec, batches)}
    if options.modelopt:
        runs["modelopt"] = modelopt(model, batches)
    times: dict[str, list[float]] = {"bare": [], **{name: [] for name in runs}}
    aside: dict[str, list[float]] = {name: [] for name in runs}
    over: dict[str, list[float]] = {name: [] for name in runs}
    noise: list[float] = []
    started = time.perf_counter()
    for round_index in range(options.rounds + 1):
        if round_index > 1 and time.perf_counter() - started > options.seconds:
            break
        bare = [seconds(lambda: forward(model, batches))]
        for name, run in runs.items():
            passed, beside = run()
            bare.append(seconds(lambda: forward(model, batches)))
            if round_index:  # the first round warms up
                times[name].append(passed)
                aside[name].append(beside)
                over[name].append(100 * (passed / statistics.mean(bare[-2:]) - 1))
        if round_index:
            times["bare"] += bare
            noise += [
                100 * (here / statistics.mean((before, after)) - 1)
                for before, here, after in zip(bare, bare[1:], bare[2:], strict=False)
            ]
    tokens = options.samples * options.length
    rows = [row_of(shape, "bare", times["bare"], noise, tokens, None)]
    rows += [row_of(shape, name, times[name], over[name], tokens, aside[name]) for name in runs]
    return rows


def row_of(
    shape: str,
    name: str,
    times: Sequence[float],
    over: Sequence[float],
    tokens: int,
    aside: Sequence[float] | None,
) -> dict[str, Any]:
    low, high = median_interval(over)
    return {
        "shape": shape,
        "pass": name,
        "runs": len(times),
        "seconds": statistics.median(times),
        "tokens/s": tokens / statistics.median(times),
        "over bare %": statistics.median(over),
        "from %": low,
        "to %": high,
        "apart s": statistics.median(aside) if aside else 0.0,
        "each %": " ".join(f"{value:.2f}" for value in over),
    }


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The order statistics between which the median lies with a probability of 95 % or more."""
    ordered, n = sorted(values), len(values)

    def coverage(k: int) -> float:
        return 1 - 2 * sum(math.comb(n, i) for i in range(k)) / (1 << n)

    k = max((k for k in range(1, n // 2 + 1) if coverage(k) >= 0.95), default=1)
    return ordered[k - 1], ordered[n - k]


def build(shape: str) -> tuple[Any, ModelSpec]:
    """A model of `shape` with random weights on the current GPU, and its spec."""
    config = LlamaConfig(
        **SHAPES[shape],
        max_position_embeddings=8192,
        rope_theta=500_000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        attn_implementation="sdpa",
    )
    default = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(default)
    return model, ModelSpec.from_config(config.to_dict(), shape)


def random_batches(options: argparse.Namespace) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    shape = (options.batch_size, options.length)
    return [
        Batch(
            torch.randint(1000, 100_000, shape, generator=generator),
            (options.length,) * options.batch_size,
            ("random",) * options.batch_size,
        )
        for _ in range(options.samples // options.batch_size)
    ]


@torch.inference_mode()
def forward(model: Any, batches: Sequence[Batch]) -> None:
    for batch in batches:
        model.base_model(input_ids=batch.token_ids.cuda(), use_cache=False)


Peer = Callable[[], tuple[float, float]]  # seconds of the passes, and of what is timed apart


def observed(model: Any, spec: ModelSpec, batches: Sequence[Batch]) -> Peer:
    """Our histograms; apart: reading them to the host."""
    tokens = sum(batch.tokens for batch in batches)

    def run() -> tuple[float, float]:
        with observing(model, spec, partial(make_counter, model.device)) as (passes, counter):
            passed = seconds(lambda: passes(batches))
            read = seconds(counter.counts)
            counts = dict(zip(observations_of(spec, model.dtype), counter.counts(), strict=True))
        check_totals(spec, counts, tokens)
        return passed, read

    return run


def absmax(model: Any, spec: ModelSpec, batches: Sequence[Batch]) -> Peer:
    def run() -> tuple[float, float]:
        with observing(model, spec, AbsmaxCounter) as (passes, _):
            return seconds(lambda: passes(batches)), 0.0

    return run


class AbsmaxCounter:
    """A `Counter` that keeps the largest magnitude of each slot instead."""

    def __init__(self, slots: int) -> None:
        self._largest = torch.zeros(slots, dtype=torch.bfloat16, device="cuda")

    def add(
        self,
        slot: int,
        x: torch.Tensor,
        lengths: Sequence[int] | None = None,
        *,
        squares: bool = False,
    ) -> None:
        largest = self._largest[slot]
        torch.maximum(largest, x.abs().amax(), out=largest)

    def beside(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def bad(self) -> Callable[[], list[int]]:
        return lambda: (~self._largest.isfinite()).nonzero().flatten().tolist()

    def counts(self) -> NDArray[np.int64]:
        return np.zeros((len(self._largest), 1), np.int64)

    def squares(self) -> dict[int, SumOfSquares]:
        return {}

    def clear(self) -> None:
        self._largest.zero_()

    def close(self) -> None:
        pass


def modelopt(model: Any, batches: Sequence[Batch]) -> Peer:
    """ModelOpt's max calibration of a copy that shares the weights; apart: its conversion."""
    import modelopt.torch.quantization as mtq

    def run() -> tuple[float, float]:
        converted = copy.deepcopy(model, {id(p): p for p in model.parameters()})
        config = {**mtq.FP8_DEFAULT_CFG, "algorithm": None}
        with quiet():
            conversion = seconds(lambda: mtq.quantize(converted, config))
            passed = seconds(
                lambda: mtq.calibrate(converted, "max", lambda model: forward(model, batches))
            )
        return passed, conversion

    return run


def modelopt_version() -> str:
    from importlib.metadata import version

    return version("nvidia-modelopt")


@contextmanager
def quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            yield
        except BaseException:
            print(printed.getvalue()[-2000:], file=sys.stderr)
            raise


def seconds(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
