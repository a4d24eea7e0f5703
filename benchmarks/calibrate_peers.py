"""Times our FP8 flow beside ModelOpt's and llm-compressor's: from a checkpoint to an FP8 one.

Each flow is a process of its own, started in alternating rounds on the same checkpoint (see
calibrate_at_size.py, which makes one) and the same 256 samples: start, load, calibrate, export.
ModelOpt and llm-compressor quantize per tensor with static activations, their standard FP8 flow;
ours is `fp8-static`, once without and once with predictions, golden records in both. With `--gpus
2`, two flows of a round run at the same time, each on a GPU and half of the cores; they change
places in every round.

    python benchmarks/calibrate_peers.py --model DIR [--rounds 5] [--gpus 1] [--output FILE]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parent.parent / "examples" / "python-lm"
COUNT, MAX_LENGTH, BATCH = 256, 512, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--flows", default=",".join(FLOWS), help="what to compare, by commas")
    parser.add_argument("--gpus", type=int, default=1, help="flows that run at the same time")
    parser.add_argument("--flow", choices=FLOWS, help="run this one, to --out, and end")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.flow:
        FLOWS[options.flow](options.model, options.out)
        return
    names = options.flows.split(",")
    times: dict[str, list[float]] = {name: [] for name in names}
    sizes: dict[str, float] = {}
    for number in range(options.rounds):
        with ThreadPoolExecutor(options.gpus) as pool:
            running = {
                name: pool.submit(
                    flow, name, options.model, (place + number) % options.gpus, options
                )
                for place, name in enumerate(names)
            }
        for name, done in running.items():
            seconds, sizes[name] = done.result()
            times[name].append(seconds)
            print(f"{name}: {seconds:.1f} s, {sizes[name]:.1f} GB", flush=True)
        if options.output:  # after every round, in case the machine goes away
            write(times, sizes, options)
    write(times, sizes, options)


def flow(name: str, model: Path, place: int, options: argparse.Namespace) -> tuple[float, float]:
    """Runs a flow on a GPU and cores of its own; returns its seconds, and gigabytes written."""
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // options.gpus
    with tempfile.TemporaryDirectory(prefix="octet-", dir=model.parent) as where:
        out = Path(where) / "out"
        command = [sys.executable, __file__, "--model", str(model)]
        environment = dict(os.environ)
        if options.gpus > 1:
            own = cores[place * share : (place + 1) * share]
            command = ["taskset", "-c", ",".join(map(str, own)), *command]
            environment["CUDA_VISIBLE_DEVICES"] = str(place)
        started = time.perf_counter()
        subprocess.run([*command, "--flow", name, "--out", str(out)], check=True, env=environment)
        seconds = time.perf_counter() - started
        return seconds, sum(x.stat().st_size for x in out.rglob("*.safetensors")) / 1e9


def write(
    times: dict[str, list[float]], sizes: dict[str, float], options: argparse.Namespace
) -> None:
    import torch
    from card import conditions, report

    from octet.artifacts.manifest import software

    card = conditions(
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        cuda=torch.version.cuda,
        peers=software("nvidia-modelopt", "llmcompressor", "compressed-tensors"),
        samples=f"{COUNT} of the example's, up to {MAX_LENGTH} tokens, batches of {BATCH}",
        figures="seconds of a whole process; medians over alternating rounds",
        **({"at the same time": f"{options.gpus} flows"} if options.gpus > 1 else {}),
    )
    rows = [
        {
            "flow": name,
            "runs": len(found),
            "seconds": statistics.median(found),
            "fastest s": min(found),
            "slowest s": max(found),
            "checkpoint GB": sizes[name],
            "each s": found,
        }
        for name, found in times.items()
        if found
    ]
    report("calibrate_peers", card, rows, options.output)


def octet_flow(model: Path, out: Path, *, predict: bool) -> None:
    samples = EXAMPLE / "samples"
    calibration = out.with_name("calibration")
    command = ["calibrate", str(model), "--samples", str(samples / "calibration.jsonl")]
    command += ["--held-out", str(samples / "heldout.jsonl"), "--count", str(COUNT)]
    command += ["--recipe", "fp8-static", "--out", str(calibration)]
    for arguments in (
        [*command, "--predict" if predict else "--no-predict"],
        ["export", "checkpoint", str(calibration), "--out", str(out)],
    ):
        subprocess.run(
            [sys.executable, "-m", "octet", *arguments], check=True, stdout=subprocess.DEVNULL
        )


def batches(model: Path) -> Iterator[Any]:
    """The samples as the peers' examples make batches: tokenized, cut and padded."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token or tokenizer.decode([0])
    lines = (EXAMPLE / "samples" / "calibration.jsonl").read_text().splitlines()[:COUNT]
    texts = [json.loads(line)["text"] for line in lines]
    for start in range(0, COUNT, BATCH):
        yield tokenizer(
            texts[start : start + BATCH],
            truncation=True,
            max_length=MAX_LENGTH,
            padding=True,
            return_tensors="pt",
        )


def load(model: Path) -> Any:
    import torch
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.bfloat16, device_map=device, trust_remote_code=False
    )


def modelopt(model: Path, out: Path) -> None:
    import modelopt.torch.quantization as mtq
    import torch
    from modelopt.torch.export import export_hf_checkpoint

    loaded = load(model)

    def forward(quantized: Any) -> None:
        with torch.inference_mode():
            for batch in batches(model):
                quantized(**batch.to(quantized.device), use_cache=False)

    mtq.quantize(loaded, mtq.FP8_DEFAULT_CFG, forward_loop=forward)
    export_hf_checkpoint(loaded, export_dir=out)


def llmcompressor(model: Path, out: Path) -> None:
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    rows = [
        {"input_ids": ids[: int(mask.sum())].tolist(), "attention_mask": [1] * int(mask.sum())}
        for batch in batches(model)
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    oneshot(
        model=load(model),
        dataset=Dataset.from_list(rows),
        recipe=QuantizationModifier(targets="Linear", scheme="FP8", ignore=["lm_head"]),
        max_seq_length=MAX_LENGTH,
        num_calibration_samples=COUNT,
        output_dir=str(out),
    )


FLOWS: dict[str, Callable[[Path, Path], None]] = {
    "octet --no-predict": lambda model, out: octet_flow(model, out, predict=False),
    "modelopt": modelopt,
    "llm-compressor": llmcompressor,
    "octet": lambda model, out: octet_flow(model, out, predict=True),
}

if __name__ == "__main__":
    main()
