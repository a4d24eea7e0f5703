"""Measures the speed of an engine by itself: what `trtexec --loadEngine` measures, in its terms.

Each profile is run repeatedly at the shape that it was tuned for; inputs and outputs are copied
each time. The cache stays on the GPU, as in serving; trtexec would copy it too. Nothing overlaps:
each step starts after the results of the one before have arrived, as in a decode loop, which needs
a token before it can compute the next. GPU times are CUDA events, accurate to half a microsecond.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from serve.runner.protocol import StepBatch
from serve.tensorrt.gpu import Event
from serve.tensorrt.interface import Limits
from serve.tensorrt.lane import Lane
from serve.tensorrt.runner import TensorRTRunner

__all__ = ["benchmark", "table"]

WARM_UP_S = 0.2  # trtexec's defaults, here and in `benchmark`
_WAYS = ("latency", "enqueue", "h2d", "gpu_compute", "d2h")
_PERCENTILES = {"p90": 90, "p95": 95, "p99": 99}


def benchmark(
    directory: Path,
    *,
    duration_s: float = 3.0,
    iterations: int = 10,
    warm_up_s: float = WARM_UP_S,
    device: int = 0,
) -> dict[str, Any]:
    """Runs each profile for at least `duration_s` and `iterations`; returns figures in seconds.

    Raises the errors of `TensorRTRunner` for an engine that cannot run here.
    """
    runner = TensorRTRunner(directory, device=device)
    details = runner.manifest.details
    return {
        "engine": str(directory),
        "model": runner.manifest.model.name,
        "recipe": runner.manifest.recipe.name,
        "kv_cache": runner.kv_dtype,
        "builder": details["builder"],
        "gpu": runner.gpu.target,
        "conditions": {
            "warm_up_s": warm_up_s,
            "duration_s": duration_s,
            "iterations": iterations,
            "transfers": "inputs and logits; the cache stays on the GPU; nothing overlaps",
        },
        "profiles": {
            name: _measure(runner, lane, duration_s, iterations, warm_up_s)
            for name, lane in (("prefill", runner.prefill), ("decode", runner.decode))
        },
    }


def table(result: Mapping[str, Any]) -> Table:
    """Makes a table of `benchmark`'s figures: a row per profile and time, in milliseconds."""
    columns = ("median", "min", "mean", "max", *_PERCENTILES)  # a narrow terminal shows the first
    made = Table(
        title=f"{result['model']}, {result['recipe']}, {result['kv_cache']} cache, on"
        f" {result['gpu']}: milliseconds",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    made.add_column("profile", overflow="fold")
    for column in ("time", columns[0], "tokens/s", *columns[1:]):
        made.add_column(column, justify="left" if column == "time" else "right", no_wrap=True)
    for name, figures in result["profiles"].items():
        shape = figures["shape"]
        label = f"{name} {shape['batch']} x {shape['tokens']}, {shape['cached']} cached"
        for way in _WAYS:
            median, *others = (f"{1e3 * figures[way][column]:.3f}" for column in columns)
            speed = f"{figures['tokens_per_s']:,.0f}" if way == "latency" else ""
            made.add_row(label if way == "latency" else "", way, median, speed, *others)
    return made


def _measure(
    runner: TensorRTRunner, lane: Lane, duration_s: float, iterations: int, warm_up_s: float
) -> dict[str, Any]:
    shape = lane.usual
    _set_up(runner, lane, shape)
    gpu, marks = runner.gpu, [Event(runner.gpu) for _ in range(4)]
    taken: dict[str, list[float]] = {way: [] for way in _WAYS}

    def step() -> None:
        marks[0].record()
        lane.copy_in()
        marks[1].record()
        began = time.perf_counter()
        lane.enqueue()
        taken["enqueue"].append(time.perf_counter() - began)
        marks[2].record()
        lane.copy_out()
        marks[3].record()
        gpu.synchronize()
        parts = [marks[i + 1].since_s(marks[i]) for i in range(3)]
        for way, part in zip(("h2d", "gpu_compute", "d2h"), parts, strict=True):
            taken[way].append(part)
        taken["latency"].append(sum(parts))

    until = time.perf_counter() + warm_up_s
    step()
    while time.perf_counter() < until:
        step()
    for values in taken.values():
        values.clear()
    began = time.perf_counter()
    while len(taken["latency"]) < iterations or time.perf_counter() < began + duration_s:
        step()
    wall_s = time.perf_counter() - began
    done = len(taken["latency"])
    return {
        "shape": {
            "batch": shape.batch,
            "tokens": shape.tokens,
            "cached": shape.cached,
            "logits": shape.logits,
        },
        "iterations": done,
        "wall_s": wall_s,
        "throughput_per_s": done / wall_s,
        "tokens_per_s": done * shape.batch * shape.tokens / wall_s,
        **{way: _summary(values) for way, values in taken.items()},
    }


def _set_up(runner: TensorRTRunner, lane: Lane, shape: Limits) -> None:
    """Sets the engine's inputs: random token ids, and a cache of zeros of the right length."""
    longest = min(runner.spec.max_positions, shape.cached + shape.tokens)
    cache = runner.new_cache(shape.batch, longest)
    slots = list(range(shape.batch))
    cache.lengths[:] = shape.cached
    chance = np.random.default_rng(0)
    ids = chance.integers(0, runner.spec.vocab_size, (shape.batch, shape.tokens))
    wanted = np.tile(np.arange(shape.tokens - shape.logits, shape.tokens), (shape.batch, 1))
    lane.prepare((shape.batch, shape.tokens, shape.cached, shape.logits), cache)
    lane.fill(StepBatch(ids, slots, wanted), cache.lengths)
    lane.copy_in()
    cache.gather(shape.batch, lane.where_address, lane.window)
    runner.gpu.synchronize()


def _summary(values: list[float]) -> dict[str, float]:
    """Summarizes times, in seconds."""
    times = np.array(values)
    return {
        "min": float(times.min()),
        "mean": float(times.mean()),
        "median": float(np.median(times)),
        **{name: float(np.percentile(times, rank)) for name, rank in _PERCENTILES.items()},
        "max": float(times.max()),
    }
