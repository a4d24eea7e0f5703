"""Compares recipes and KV caches in vLLM: speed, quality, and the bound that memory sets.

Serves one model as {BF16, fp8, fp8-static, fp8-block, nvfp4} with each KV cache {auto, e4m3, e5m2},
all servers of a GPU at once, and measures them in alternating rounds as `octet bench` does. Each
recipe is exported twice: the e5m2 export is served with `auto` too, since its tensors are the same.

Each inter-token latency stands beside its bound: the bytes of the weights and of the cache that one
step reads (all linear layers and the head; the keys and values of every request), divided by the
bandwidth that a copy reaches on this GPU. The load generator is vLLM's, in this process.

    python benchmarks/recipe_grid.py make --model DIR --work DIR
    python benchmarks/recipe_grid.py run --model DIR --work DIR --output FILE [--only bf16:auto,fp8]

`make` writes the artifacts and needs no vLLM; `run` needs vLLM 0.24 to 0.26, on a GPU whose memory
holds all servers.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from card import conditions, report

from octet.artifacts.manifest import software
from serve.vllm.server import VllmServer
from verify.bench.figures import summarise
from verify.bench.load import Generator, Load, Place
from verify.bench.machine import kv_capacity
from verify.bench.rounds import Plan, measure
from verify.evaluation.comparison import compare
from verify.evaluation.evaluator import evaluate
from verify.evaluation.targets.open import open_target, read_samples
from verify.evaluation.targets.server import Server

SAMPLES = Path(__file__).parent.parent / "examples" / "python-lm" / "samples"
RECIPES = ("fp8", "fp8-static", "fp8-block", "nvfp4")
CACHES = ("auto", "e4m3", "e5m2")
LOADS = ("1x128x128", "1x7900x128", "16x1024x128")
SCORED, LONGEST, TOP_K = 24, 512, 20  # samples, tokens of each, tokens compared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("make", "run"))
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    default = "bf16," + ",".join(RECIPES)
    parser.add_argument("--only", default=default, help="rows by commas, or cells: bf16:auto")
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=2, help="of a run, for each client")
    parser.add_argument("--cache-gib", type=float, default=2.5, help="KV cache of each server")
    parser.add_argument("--vllm", default="vllm", help="the command that serves")
    parser.add_argument("--vllm-options", default="--max-model-len 8192 --max-num-seqs 64")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    if options.command == "make":
        make(options)
    else:
        run(options)


def cells_of(text: str) -> list[tuple[str, str]]:
    """Parses `fp8,bf16:auto` into (row, cache); a row without a cache has all."""
    cells = []
    for item in text.split(","):
        row, _, cache = item.partition(":")
        cells += [(row, one) for one in ([cache] if cache else CACHES)]
    return cells


def make(options: argparse.Namespace) -> None:
    """Calibrates and exports each recipe, all at once, and scores the unquantized model."""
    recipes = {row for row, _ in cells_of(options.only)} - {"bf16"}
    with ThreadPoolExecutor() as executor:
        list(executor.map(lambda recipe: make_recipe(recipe, options), recipes))
    origin = open_target(str(options.model), None, 1)
    sequences = read_samples(
        [origin], SAMPLES / "heldout.jsonl", count=SCORED, text_field="text", max_length=LONGEST
    )
    evaluate([], origin, sequences, k=TOP_K, out=options.work / "answers")
    (options.work / "bandwidth.json").write_text(json.dumps(bandwidth()))


def make_recipe(recipe: str, options: argparse.Namespace) -> None:
    calibration = options.work / f"calibration-{recipe}"
    if not calibration.exists():
        octet(
            *("calibrate", options.model, "--samples", SAMPLES / "calibration.jsonl"),
            *("--held-out", SAMPLES / "heldout.jsonl", "--recipe", recipe, "--no-predict"),
            *("--name", "grid", "-o", calibration),
        )
    for cache in ("e4m3", "e5m2"):
        out = options.work / f"{recipe}-{cache}"
        if not out.exists():
            octet("export", "checkpoint", calibration, "--kv", cache, "-o", out)


def octet(*words: object) -> None:
    command = [sys.executable, "-m", "octet", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr[-2000:]}")


def bandwidth() -> float | None:
    """Returns the bytes per second that a copy of 4 GB reads and writes: median of 20."""
    import torch

    if not torch.cuda.is_available():
        return None
    x = torch.empty(1 << 32, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    times: list[float] = []
    for _ in range(23):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        y.copy_(x)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * x.numel() / sorted(times[3:])[10]


class InProcess(Generator):
    """`vllm bench serve` in this process: a process of its own loads vLLM for 10 s each time."""

    def _execute(self, words: list[str], log: Path, environment: dict[str, str]) -> int:
        from vllm.benchmarks.serve import add_cli_args, main_async
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        os.environ.update(environment)
        parser = FlexibleArgumentParser()
        add_cli_args(parser)
        with log.open("w") as file, redirect_stdout(file), redirect_stderr(file):
            asyncio.run(main_async(parser.parse_args(words[3:])))
        return 0


def run(options: argparse.Namespace) -> None:
    started = time.monotonic()
    with ExitStack() as stack:
        servers = start(cells_of(options.only), options, stack)
        print(f"{len(servers)} servers after {time.monotonic() - started:.0f} s", flush=True)
        figures(servers, options)


def start(
    cells: list[tuple[str, str]], options: argparse.Namespace, stack: ExitStack
) -> dict[tuple[str, str], VllmServer]:
    """Starts all servers at once; returns those that came up."""
    memory = int(options.cache_gib * 2**30)
    shared = [*options.vllm_options.split(), "--gpu-memory-utilization", "0.02"]
    shared += ["--kv-cache-memory-bytes", str(memory)]
    servers = {}
    for row, cache in cells:
        if row == "bf16":
            checkpoint = options.model
        else:
            checkpoint = options.work / f"{row}-{'e4m3' if cache == 'e4m3' else 'e5m2'}"
        chosen = cache if cache == "auto" else f"fp8_{cache}"
        server = VllmServer(
            checkpoint,
            log=options.work / f"vllm-{row}-{cache}.log",
            command=options.vllm,
            options=[*shared, "--kv-cache-dtype", chosen, "--served-model-name", "grid"],
            environment={"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
        )
        server.start()
        stack.callback(server.stop)
        servers[row, cache] = server
    ready = {}
    for cell, server in servers.items():
        try:
            server.wait(900)
            ready[cell] = server
        except Exception as error:
            print(f"{cell}: {error}", flush=True)
    return ready


def figures(servers: dict[tuple[str, str], VllmServer], options: argparse.Namespace) -> None:
    names = {cell: f"{cell[0]} / {cell[1]}" for cell in servers}
    targets = [Server(server.url, name=names[cell]) for cell, server in servers.items()]
    origin = open_target(str(options.model), None, 1)
    sequences = read_samples(
        [origin], SAMPLES / "heldout.jsonl", count=SCORED, text_field="text", max_length=LONGEST
    )
    answers = options.work / "answers"
    quality = compare(evaluate(targets, origin, sequences, k=TOP_K, out=answers))
    print("quality is measured", flush=True)
    loads = [Load.parse(text) for text in options.loads.split(",")]
    places = [Place(one.name, one.url, one.model, True) for one in targets]
    plan = Plan(places, [one.identity for one in targets], loads, options.rounds, options.requests)
    done = measure(plan, InProcess("vllm", options.model), out=options.work / "runs")
    bench = summarise(plan, done, [kv_capacity(one.url, None) for one in targets], quality)
    copied = options.work / "bandwidth.json"
    width = json.loads(copied.read_text()) if copied.exists() else None
    rows = []
    for number, (cell, server) in enumerate(servers.items()):
        row: dict[str, Any] = {"weights": cell[0], "cache": cell[1]}
        row["KV tokens"] = bench.kv_capacity_tokens[number]
        scored = quality.rows[number]
        for label, interval in (("perplexity", scored.perplexity), ("KL", scored.kl)):
            row[label] = None if interval is None else interval.mean
            row[f"{label} low"] = None if interval is None else interval.low
            row[f"{label} high"] = None if interval is None else interval.high
        for load, found in zip(loads, bench.cells, strict=True):
            measured = found[number].figures
            for figure in ("tokens_per_s", "ttft_p50_ms", "itl_p50_ms"):
                row[f"{load} {figure}"] = measured[figure].median
            row[f"{load} tokens_per_s low"] = measured["tokens_per_s"].low
            row[f"{load} tokens_per_s high"] = measured["tokens_per_s"].high
            if (power := found[number].gpu_power_w) is not None:
                row[f"{load} W"] = power.median
            if width is not None:
                bound = step_bytes(server.checkpoint, cell[1], load) / width * 1e3
                row[f"{load} itl bound ms"] = bound
        rows.append(row)
    if options.output:
        from verify.bench.html import write_page

        write_page(options.output.with_suffix(".html"), bench)
    card = conditions(
        **gpu(),
        peers=software("vllm", "flashinfer-python", "compressed-tensors"),
        model=f"{options.model.name}, {len(sequences.ids)} samples scored",
        copy_bytes_per_s=width,
        cache_gib=options.cache_gib,
        options=options.vllm_options,
        rounds=options.rounds,
        requests_per_client=options.requests,
        environment={k: v for k, v in os.environ.items() if k.startswith("VLLM_")},
        servers=f"{len(servers)} on this GPU at once; one of them under load at a time",
    )
    report("recipe_grid", card, rows, options.output)


def gpu() -> dict[str, Any]:
    import torch

    found = torch.cuda.is_available()
    return {"gpu": torch.cuda.get_device_name() if found else None, "cuda": torch.version.cuda}


def step_bytes(checkpoint: Path, cache: str, load: Load) -> float:
    """Returns the bytes that one decode step reads halfway through the output of a load."""
    config = json.loads((checkpoint / "config.json").read_text())
    weights = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    if not config.get("tie_word_embeddings", False):  # a step reads few rows of the embedding
        weights -= 2 * config["vocab_size"] * config["hidden_size"]
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    width = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head
    of_token = width * (2 if cache == "auto" else 1)
    return float(weights + load.clients * (load.prompt + load.output / 2) * of_token)


if __name__ == "__main__":
    main()
