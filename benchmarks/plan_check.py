"""Compares the KV-cache blocks that `octet plan` predicts with those that vLLM reports.

Starts vLLM on models with random weights, of real sizes, and reads from it the number of blocks and
what it measured of its memory. Each case runs in a process of its own, and is written to `--output`
as it ends: the same command continues there. Exits with 1 if a case is off by more than 2 %.

    python benchmarks/plan_check.py --output FILE [--only llama] [--python PYTHON]
    python benchmarks/plan_check.py --compare FILE [FILE ...]

The first needs a GPU, and vLLM 0.24 in `--python`: one to two minutes a case. The second needs
neither, and predicts again.
"""

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from card import conditions, report
from vllm_offline import ENVIRONMENT

from export.checkpoint.compressed_tensors import CompressedTensors
from octet.hardware.devices import find_device
from octet.model.spec import ModelSpec
from octet.plan.sizes import Sizes
from octet.plan.vllm_memory import UTILIZATION, Engine, divide, usable_memory
from octet.recipe import KvCacheDtype, Recipe
from serve.vllm.process import child_process

LIMIT = 0.02
DTYPES = {"float16": "auto", "e4m3": "fp8_e4m3", "e5m2": "fp8_e5m2"}
_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": 128}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": _LLAMA
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
    "llama-70b": _LLAMA
    | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    | {"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256},
    "qwen3-14b": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128}
    | {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40}
    | {"num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 151936},
    "qwen2-7b": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    | {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
    | {"num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064},
    "qwen3-30b-a3b": {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "head_dim": 128}
    | {"num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 151936}
    | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
}


@dataclass(frozen=True)
class Case:
    shape: str
    recipe: str  # bf16: not quantized
    cache: KvCacheDtype
    max_num_seqs: int
    max_num_batched_tokens: int
    context: int
    tensor_parallel: int = 1

    @property
    def name(self) -> str:
        load = f"{self.max_num_seqs} x {self.context}, {self.max_num_batched_tokens} a batch"
        return f"{self.shape} {self.recipe} {self.cache} tp{self.tensor_parallel}, {load}"


CASES = (
    Case("llama-8b", "bf16", "float16", 256, 8192, 8192),
    Case("llama-8b", "fp8", "e4m3", 64, 8192, 32768),
    Case("llama-8b", "fp8", "e5m2", 1024, 16384, 8192),
    Case("llama-8b", "nvfp4", "float16", 64, 2048, 8192),
    Case("qwen3-14b", "fp8-block", "e4m3", 128, 8192, 16384),
    Case("qwen2-7b", "bf16", "float16", 256, 8192, 8192),
    Case("qwen2-7b", "fp8-static", "e4m3", 1024, 8192, 8192),
    Case("qwen3-30b-a3b", "fp8", "e4m3", 256, 8192, 8192),
    Case("llama-70b", "fp8", "e4m3", 64, 8192, 4096),
    Case("llama-70b", "fp8", "e4m3", 64, 8192, 32768, tensor_parallel=2),
)
# What vLLM's log says of its memory.
_SAID = {
    "weights_gib": re.compile(r"Model loading took ([\d.]+) GiB"),
    "available_gib": re.compile(r"Available KV cache memory: ([\d.]+) GiB"),
    "peak_gib": re.compile(r"torch peak memory increase: ([\d.]+)GiB"),
    "non_torch_gib": re.compile(r"non-torch forward increase memory: ([\d.]+)GiB"),
    "graphs_gib": re.compile(r"Estimated CUDA graph memory: ([\d.]+) GiB"),
    "attention": re.compile(r"Using (?:AttentionBackendEnum\.)?(\w+) (?:attention )?backend"),
    "runner": re.compile(r"Using (V2) Model Runner"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compare", type=Path, nargs="+", help="files that were measured before")
    parser.add_argument("--output", type=Path, help="where the cases are written, or continued")
    parser.add_argument("--only", default="", help="cases whose name this pattern is found in")
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has vLLM")
    parser.add_argument("--logs", type=Path, help="keep the engines' logs here")
    parser.add_argument("--seconds", type=float, default=420, help="that one case may take")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(CASES[int(options.serve[0])], Path(options.serve[1]))
        return
    if options.compare:
        files = [json.loads(file.read_text()) for file in options.compare]
        rows, card = [row for file in files for row in file["results"]], files[0]["conditions"]
    else:
        rows, card = measured(options)
    whole = [row | predicted(row) for row in rows]
    for row in whole:
        print(f"{row['case']}: {row.get('blocks')} blocks, {row.get('error', math.nan):+.2%}")
    report("plan_check", card, whole, options.output)
    off = [row["case"] for row in rows if not abs(predicted(row).get("error", 0)) <= LIMIT]
    sys.exit(f"off by more than {LIMIT:.0%}: {'; '.join(off)}" if off else 0)


def measured(options: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Runs the cases that `--output` does not hold yet, and writes each as it ends."""
    before = json.loads(options.output.read_text()) if options.output.exists() else {}
    rows: list[dict[str, Any]] = [row for row in before.get("results", ()) if row.get("blocks")]
    card: dict[str, Any] = {}
    for index, case in enumerate(CASES):
        if not re.search(options.only, case.name) or any(r["case"] == case.name for r in rows):
            continue
        row = {"case": case.name, **asdict(case), **run(index, options)}
        print(json.dumps(row), flush=True)
        rows.append(row)
        card = conditions(
            gpu=next((r["gpu"] for r in rows if r.get("gpu")), None),
            vllm=next((r["vllm"] for r in rows if r.get("vllm")), None),
            utilization=UTILIZATION,
            weights="random (--load-format dummy)",
        )
        whole = {"benchmark": "plan_check", "conditions": card, "results": rows}
        options.output.write_text(json.dumps(whole, indent=1) + "\n")
    return rows, card or before["conditions"]


def run(index: int, options: argparse.Namespace) -> dict[str, Any]:
    """Starts vLLM in a process of its own; returns what it reports, or the error."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log" if options.logs is None else options.logs / f"case{index}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        words = [options.python, __file__, "--serve", str(index), folder]
        environment = ENVIRONMENT | {"VLLM_LOGGING_LEVEL": "DEBUG"}
        with log.open("wb") as output, child_process(words, output, environment) as process:
            try:
                process.wait(options.seconds)
            except subprocess.TimeoutExpired:
                return {"error_text": f"not ready after {options.seconds:.0f} s"}
        text = log.read_text("utf-8", "replace")
        found = {key: said.findall(text) for key, said in _SAID.items()}
        result = Path(folder) / "result.json"
        if not result.exists():
            return {"error_text": text.strip()[-1500:]}
        values = {key: _number(each[-1]) for key, each in found.items() if each}
        served: dict[str, Any] = json.loads(result.read_text())
        return served | values


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def config_of(case: Case) -> dict[str, Any]:
    """Returns the config.json of a model of this shape, quantized as an export is."""
    config = SHAPES[case.shape] | {
        "max_position_embeddings": 32768,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if case.recipe == "bf16":
        return config
    spec, recipe = ModelSpec.from_config(config, case.shape), Recipe.load(case.recipe)
    shapes = dict(spec.tensor_shapes())
    source: Any = SimpleNamespace(
        spec=spec,
        kv_cache=case.cache,
        checkpoint=SimpleNamespace(shards=(), tensor_names=list(shapes), shape=shapes.__getitem__),
        schemes=lambda linear: recipe.scheme_of(linear.name),
        quantized_schemes=lambda linear: recipe.scheme_of(linear.name),
        quantized_linears=lambda: {x.name: x for x in spec.linears() if recipe.scheme_of(x.name)},
    )
    config["quantization_config"] = CompressedTensors().config(source)
    return config


def serve(case: Case, folder: Path) -> None:
    """Starts vLLM on random weights, and writes what it reports."""
    import torch
    import vllm

    (folder / "config.json").write_text(json.dumps(config_of(case)))
    engine = vllm.LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=case.context,
        max_num_seqs=case.max_num_seqs,
        max_num_batched_tokens=case.max_num_batched_tokens,
        tensor_parallel_size=case.tensor_parallel,
        kv_cache_dtype=DTYPES[case.cache],
        gpu_memory_utilization=UTILIZATION,
        seed=0,
    )
    cache = engine.llm_engine.vllm_config.cache_config
    result = {
        "blocks": cache.num_gpu_blocks,
        "block_size": cache.block_size,
        "gpu": torch.cuda.get_device_name(),
        "memory_bytes": torch.cuda.mem_get_info()[1],
        "vllm": vllm.__version__,
    }
    (folder / "result.json").write_text(json.dumps(result))


def predicted(row: dict[str, Any]) -> dict[str, Any]:
    """Returns what `octet plan` predicts for a case, in GiB and blocks, and its relative error."""
    if not row.get("blocks"):
        return {}
    case = Case(**{field: row[field] for field in Case.__dataclass_fields__})
    recipe = None if case.recipe == "bf16" else Recipe.load(case.recipe)
    sizes = Sizes(ModelSpec.from_config(config_of_original(case), case.shape), recipe)
    engine = Engine(case.tensor_parallel, case.max_num_seqs, case.max_num_batched_tokens)
    gpu = find_device(row["gpu"])
    assert gpu.memory is not None
    memory = divide(sizes, case.cache, engine, usable_memory(gpu.memory))
    parts = ("weights", "activations", "graphs", "other", "cache")
    gib = {f"predicted_{part}_gib": getattr(memory, part) / 2**30 for part in parts}
    return {**gib, "predicted_blocks": memory.blocks, "error": memory.blocks / row["blocks"] - 1}


def config_of_original(case: Case) -> dict[str, Any]:
    config = config_of(case)
    config.pop("quantization_config", None)
    return config


if __name__ == "__main__":
    main()
