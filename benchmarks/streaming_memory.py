"""Calibrating a model in less memory than the model: the peak resident set of a 3B Llama shape.

The claim it checks: under 4 GB for a checkpoint of 6.4 GB in shards of 1 GB, from the command line,
golden records and scales included. Writes a random checkpoint of that shape (hidden 3072, 28
layers, 24 heads, 8 KV heads of 128, MLP 8192, vocabulary 128,256, BF16) to a temporary directory,
runs `octet calibrate` on it and reads VmHWM, the peak that Linux keeps of the process. Pages of the
mapped shards count as long as they are resident. Exits with 1 over the limit.

    python benchmarks/streaming_memory.py [--output FILE] [--recipe fp8] [--directory DIR]
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from card import conditions, report

from octet.model.spec import ModelSpec
from octet.storage.tensors import PendingTensor, write_tensors

EXAMPLE = Path(__file__).parent.parent / "examples" / "python-lm"
LIMIT = 4e9  # bytes
SHARD = 1e9
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 0,
}
RUN = """
from octet_cli.main import main
try:
    main()
finally:
    peak = [x for x in open("/proc/self/status") if x.startswith("VmHWM")][0]
    open({path!r}, "w").write(peak)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=128, help="samples")
    parser.add_argument("--max-length", type=int, default=16, help="tokens of a sample")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--recipe", default="fp8")
    parser.add_argument("--directory", type=Path, help="where 8 GB are free")
    parser.add_argument(
        "--predict", action="store_true", help="predict too: 20 more passes over 64 prompts"
    )
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="octet-", dir=options.directory) as name:
        directory = Path(name)
        config = CONFIG | {"num_hidden_layers": options.layers}
        shards, size = write_checkpoint(directory / "model", config)
        samples = directory / "samples.jsonl"
        samples.write_text("".join(short_samples(options.count + 16)))
        started = time.perf_counter()
        peak = calibrate(directory, samples, options)
        seconds = time.perf_counter() - started
    row = {
        "checkpoint_gb": size / 1e9,
        "shards": shards,
        "peak_resident_gb": peak / 1e9,
        "limit_gb": LIMIT / 1e9,
        "seconds": seconds,
    }
    card = conditions(
        model=f"Llama 3B shape, {options.layers} layers, random weights, BF16",
        samples=f"{options.count} of {options.max_length} tokens, 8 in a batch",
        recipe=options.recipe,
        command="octet calibrate, with its journal, golden records and scales"
        + (" and predictions" if options.predict else ""),
    )
    report("streaming_memory", card, [row], options.output)
    if peak > LIMIT:
        sys.exit(f"peak resident set {peak / 1e9:.2f} GB is over {LIMIT / 1e9:.0f} GB")


def write_checkpoint(path: Path, config: dict[str, Any]) -> tuple[int, int]:
    """Random weights of standard deviation 0.02, norms of 1; (shards, bytes)."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    for file in (EXAMPLE / "model").glob("tokenizer*"):
        shutil.copy(file, path)
    shapes = list(ModelSpec.from_config(config, str(path)).tensor_shapes())
    groups: list[dict[str, PendingTensor]] = [{}]
    size = 0
    for number, (name, shape) in enumerate(sorted(shapes)):
        tensor = PendingTensor("BF16", shape, partial(random_codes, number, shape))
        if groups[-1] and sum(x.nbytes for x in groups[-1].values()) + tensor.nbytes > SHARD:
            groups.append({})
        groups[-1][name] = tensor
        size += tensor.nbytes
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, start=1):
        shard = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        write_tensors(path / shard, group)
        weight_map |= dict.fromkeys(group, shard)
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return len(groups), size


def random_codes(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """BF16 codes: normal, or 1 for a norm."""
    if len(shape) == 1:
        return np.full(shape, 0x3F80, np.uint16)
    rng = np.random.default_rng(seed)
    block = (rng.standard_normal(1 << 20, np.float32) * np.float32(0.02)).view(np.uint32) >> 16
    # A million different values, in an order of their own in each row, are random enough.
    codes = np.empty(int(np.prod(shape)), np.uint16)
    for start in range(0, len(codes), len(block)):
        part = codes[start : start + len(block)]
        part[:] = np.roll(block, int(rng.integers(len(block))))[: len(part)]
    return codes.reshape(shape)


def short_samples(count: int) -> Iterator[str]:
    for number in range(count):
        text = f"def function_{number}(value):\n    return value * {number} + value\n"
        yield json.dumps({"text": text}) + "\n"


def calibrate(directory: Path, samples: Path, options: argparse.Namespace) -> int:
    """VmHWM of `octet calibrate`, in bytes."""
    peak = directory / "peak"
    command = [
        *("calibrate", str(directory / "model"), "--samples", str(samples)),
        *("--out", str(directory / "out"), "--recipe", options.recipe, "--name", "llama-3b-shape"),
        *("--count", str(options.count), "--max-length", str(options.max_length)),
        "--predict" if options.predict else "--no-predict",
    ]
    subprocess.run(
        [sys.executable, "-c", RUN.format(path=str(peak)), *command],
        check=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)},
    )
    return int(peak.read_text().split()[1]) * 1024


if __name__ == "__main__":
    main()
