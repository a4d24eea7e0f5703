"""Measures calibrating layer by layer on a GPU, beside the same model whole in memory.

Writes a random checkpoint of Llama-8B layers to a temporary directory, then in alternating rounds
times a bare forward pass of the model in GPU memory, and `observe_checkpoint`, which reads every
layer from disk (the page cache, after the first round), with and without a journal.

    python benchmarks/gpu_streaming.py [--layers 12] [--samples 64] [--output FILE]
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from card import conditions, report
from streaming_memory import CONFIG, write_checkpoint

from calibrate.decoder.loading import load_model
from calibrate.observe.sweep import observe_checkpoint
from calibrate.samples.batches import Batch
from octet.model.checkpoint import Checkpoint

SHAPE = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sample")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="octet-") as name:
        directory = Path(name)
        write_checkpoint(
            directory / "model", CONFIG | SHAPE | {"num_hidden_layers": options.layers}
        )
        checkpoint = Checkpoint.open(directory / "model")
        batches = random_batches(options, checkpoint.spec.vocab_size)
        times = measure(checkpoint, batches, directory, options.rounds)
    tokens = options.samples * options.length
    rows = [
        {
            "pass": name,
            "runs": len(found),
            "seconds": statistics.median(found),
            "fastest s": min(found),
            "slowest s": max(found),
            "tokens/s": tokens / statistics.median(found),
        }
        for name, found in times.items()
    ]
    card = conditions(
        gpu=torch.cuda.get_device_name(),
        cuda=torch.version.cuda,
        model=f"{options.layers} layers of the Llama 8B shape, random weights, BF16",
        workload=f"{options.samples} x {options.length} random tokens, batches of"
        f" {options.batch_size}",
        figures="seconds are medians over rounds, after one round to warm up",
    )
    report("gpu_streaming", card, rows, options.output)


def random_batches(options: argparse.Namespace, vocab_size: int) -> list[Batch]:
    torch.manual_seed(0)
    size, length = options.batch_size, options.length
    return [
        Batch(
            torch.randint(vocab_size, (size, length)), (length,) * size, (f"batch {index}",) * size
        )
        for index in range(options.samples // size)
    ]


def measure(
    checkpoint: Checkpoint, batches: list[Batch], directory: Path, rounds: int
) -> dict[str, list[float]]:
    model = load_model(checkpoint, "bfloat16").to("cuda")

    @torch.inference_mode()
    def bare() -> None:
        for batch in batches:
            model.base_model(batch.token_ids.to("cuda"), use_cache=False)

    def streamed(journal: Path | None) -> None:
        observe_checkpoint(checkpoint, batches, dtype="bfloat16", device="cuda", journal=journal)

    def journaled() -> None:
        path = directory / "journal"
        shutil.rmtree(path, ignore_errors=True)
        streamed(path)

    runs: dict[str, Callable[[], None]] = {
        "bare, in memory": bare,
        "layer by layer": lambda: streamed(None),
        "layer by layer, journal": journaled,
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            torch.cuda.synchronize()
            started = time.perf_counter()
            run()
            torch.cuda.synchronize()
            if number:
                times[name].append(time.perf_counter() - started)
    return times


if __name__ == "__main__":
    main()
