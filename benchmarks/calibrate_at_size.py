"""Times `calibrate` with everything included, phase by phase, at the sizes that people serve.

Writes a checkpoint of a Llama shape with random BF16 weights in shards to `--directory`, in memory
(the files are then in the page cache), calibrates it on the example's samples, and samples what the
GPU does meanwhile. If memory is too small, `--disk-shards` of the shards go to a disk: the first
ones, which are read only until the GPU holds them.

    python benchmarks/calibrate_at_size.py [--shape 8b] [--runs 1] [--output FILE]
    python benchmarks/calibrate_at_size.py --shape 70b --disk /tmp --disk-shards 12

Several processes need a checkpoint that an earlier run has made:

    torchrun --nproc-per-node 2 benchmarks/calibrate_at_size.py --shape 70b --keep /dev/shm/70b
"""

import argparse
import json
import os
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from card import conditions, report
from rich.console import Console
from safetensors.torch import save_file
from streaming_memory import CONFIG, EXAMPLE

from calibrate import pipeline
from calibrate.options import Options
from octet.model.spec import ModelSpec
from octet.recipe import PRESETS

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
    | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    | {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128},
}
SHARDS = {"tiny": 10, "8b": 10, "70b": 30}
PHASES = {  # attributes of `pipeline`, and what each is called here
    "validate": "validate",
    "require_runnable": "imports",
    "read_inputs": "samples",
    "LayerWeights": "placing",
    "check_finite": "finite check",
    "make_counter": "compiling",
    "observe_checkpoint": "observing",
    "_golden_records": "golden records",
    "find_folds": "folding",
    "solve": "scales",
    "report_on": "report",
    "_predict": "predictions",
    "_write": "writing",
    "print_report": "printing",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--recipe", choices=PRESETS, default="fp8")
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--disk", type=Path, default=Path("/tmp"))
    parser.add_argument("--disk-shards", type=int, default=0, help="shards that go there")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--no-predict", action="store_true")
    parser.add_argument("--keep", type=Path, help="a checkpoint to use, and to make if missing")
    parser.add_argument("--make", action="store_true", help="make the checkpoint, and stop")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory(prefix="octet-", dir=options.directory) as name,
        tempfile.TemporaryDirectory(prefix="octet-", dir=options.disk) as disk,
    ):
        model = options.keep or Path(name) / "model"
        if not model.exists():
            config = CONFIG | {"tie_word_embeddings": False} | SHAPES[options.shape]
            write_checkpoint(model, config, SHARDS[options.shape], Path(disk), options.disk_shards)
        for number in range(0 if options.make else options.runs):
            out = options.keep.parent if options.keep else Path(name)  # the same for all ranks
            rows += run(model, out / "octet-calibration", options, number)
    if options.make or int(os.environ.get("RANK", "0")):
        return
    card = conditions(
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        cuda=torch.version.cuda,
        model=f"Llama {options.shape} shape, random weights, BF16, in memory"
        + (
            f" but for {options.disk_shards} shards of {SHARDS[options.shape]}"
            if options.disk_shards
            else ""
        ),
        samples="256 of the example's, 64 golden prompts of its held-out samples",
        recipe=options.recipe,
        predictions=not options.no_predict,
        processes=int(os.environ.get("WORLD_SIZE", "1")),
    )
    report("calibrate_at_size", card, rows, options.output)


def write_checkpoint(
    path: Path, config: dict[str, Any], shards: int, disk: Path, on_disk: int = 0
) -> None:
    """Writes norms of 1 and random weights of standard deviation 0.02.

    The first `on_disk` of `shards` files go to the directory `disk`.
    """
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    for file in (EXAMPLE / "model").glob("tokenizer*"):
        shutil.copy(file, path)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    shapes = list(ModelSpec.from_config(config, str(path)).tensor_shapes())
    total = sum(torch.Size(shape).numel() for _, shape in shapes)
    where: dict[str, str] = {}
    part: dict[str, torch.Tensor] = {}
    number, size = 1, 0
    writing: deque[Future[None]] = deque()
    with ThreadPoolExecutor() as pool:
        for index, (name, shape) in enumerate(shapes):
            tensor = torch.ones(shape, dtype=torch.bfloat16, device=device)
            if len(shape) > 1:
                tensor.normal_(0, 0.02, generator=generator)
            part[name] = tensor.cpu()
            size += tensor.numel()
            if size >= total / shards or index == len(shapes) - 1:
                shard = f"model-{number:05}-of-{shards:05}.safetensors"
                place = path / shard
                if number <= on_disk:
                    place.symlink_to(disk / shard)
                    place = disk / shard
                writing.append(pool.submit(save_file, part, place, {"format": "pt"}))
                if len(writing) > 3:  # the shards that wait take memory
                    writing.popleft().result()
                where |= dict.fromkeys(part, shard)
                part, size, number = {}, 0, number + 1
        for written in writing:
            written.result()
    listed = {"metadata": {"total_size": 2 * total}, "weight_map": where}
    (path / "model.safetensors.index.json").write_text(json.dumps(listed))


def run(
    model: Path, out: Path, options: argparse.Namespace, number: int
) -> Iterator[dict[str, Any]]:
    """Calibrates once; yields a row for each phase, and one for everything."""
    spans: dict[str, tuple[float, float]] = {}
    with timed(spans), sampled() as samples:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        pipeline.run(
            Options(
                model=model,
                samples=EXAMPLE / "samples" / "calibration.jsonl",
                held_out=EXAMPLE / "samples" / "heldout.jsonl",
                count=256,
                out=out,
                recipe=PRESETS[options.recipe],
                predict=not options.no_predict,
                force=True,
            ),
            console=Console(),
        )
        spans["everything"] = started, time.perf_counter()
    for phase, (start, stop) in spans.items():
        within = [x for x in samples if start <= x[0] <= stop] or [(0.0, 0.0, 0.0)]
        yield {
            "run": number,
            "phase": phase,
            "seconds": stop - start,
            "gpu utilization %": sum(x[1] for x in within) / len(within),
            "peak gpu GB": max(x[2] for x in within) / 1e9,
        }


@contextmanager
def timed(spans: dict[str, tuple[float, float]]) -> Iterator[None]:
    """While active, notes when each phase of `pipeline` starts and stops."""

    def wrap(function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                if torch.cuda.is_available() and phase != "report":  # built beside predictions
                    torch.cuda.synchronize()
                spans[phase] = started, time.perf_counter()
                print(f"{phase}: {spans[phase][1] - started:.1f} s", flush=True)

        return run

    before = {name: getattr(pipeline, name) for name in PHASES}
    for name, phase in PHASES.items():
        setattr(pipeline, name, wrap(before[name], phase))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(pipeline, name, function)


@contextmanager
def sampled() -> Iterator[list[tuple[float, float, float]]]:
    """While active, appends (time, utilization in %, memory in bytes) ten times a second."""
    found: list[tuple[float, float, float]] = []
    done = threading.Event()

    def sample() -> None:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        while not done.wait(0.1):
            use = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle).used
            found.append((time.perf_counter(), float(use), float(memory)))

    if not torch.cuda.is_available():
        yield found
        return
    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


if __name__ == "__main__":
    main()
