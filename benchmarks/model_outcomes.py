"""The outcome of `calibrate` on many small checkpoints, on what is none, and on sample files.

Each model is written whole by transformers: its own configuration class, random weights, the
example's tokenizer. Where `calibrate` succeeds, the golden records are compared with the logits of
the whole model in transformers, and the exported checkpoint is verified. A refusal has to be one
line, and to take less than one second of CPU time beyond that of a command that fails at once.

    python benchmarks/model_outcomes.py [--only WORD ...] [--output FILE]

Prints a Markdown table. Exits with 1 if an outcome breaks one of these rules.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from card import conditions

from octet.artifacts.golden import GoldenSet

# transformers changes torch's globals while it makes or loads a model: one at a time.
_MAKING = threading.Lock()
ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "python-lm" / "model"
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 4096,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
    "initializer_range": 0.1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
SLIDING = ["sliding_attention", "full_attention"]
LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 16,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}

# Row -> model_type of transformers, and the keys that differ from SIZES (... for one to leave out).
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", {}),
    "Llama 2, linear RoPE scaling": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}},
    ),
    "Llama 3.1, llama3 RoPE scaling": ("llama", {"rope_parameters": LLAMA3}),
    "Llama, YaRN": ("llama", {"rope_parameters": YARN}),
    "Mistral": ("mistral", {"sliding_window": 24}),
    "Ministral 3": ("ministral3", {}),
    "Mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen2": ("qwen2", {}),
    "Qwen2-MoE": ("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 32}),
    "Qwen3": ("qwen3", {"head_dim": 32}),
    "Qwen3-MoE": ("qwen3_moe", EXPERTS),
    "Qwen3-Next": (
        "qwen3_next",
        EXPERTS
        | {
            "shared_expert_intermediate_size": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "Gemma": ("gemma", {"head_dim": 32}),
    "Gemma 2": ("gemma2", {"sliding_window": 24, "query_pre_attn_scalar": 32}),
    "Gemma 3": ("gemma3_text", {"sliding_window": 24, "query_pre_attn_scalar": 32}),
    "Phi-2": ("phi", {"partial_rotary_factor": 0.5}),
    "Phi-3": ("phi3", {"sliding_window": 24}),
    "OLMo": ("olmo", {}),
    "OLMo 2": ("olmo2", {}),
    "OLMo 3": ("olmo3", {"sliding_window": 24, "layer_types": SLIDING}),
    "OLMoE": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "Granite": ("granite", {"embedding_multiplier": 3.0, "logits_scaling": 2.0}),
    "Granite MoE": ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "SmolLM3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "Cohere": ("cohere", {}),
    "Cohere 2": ("cohere2", {"sliding_window": 24, "layer_types": SLIDING}),
    "StableLM": ("stablelm", {"partial_rotary_factor": 0.25}),
    "StarCoder2": ("starcoder2", {"sliding_window": None}),
    "GLM-4": ("glm4", {}),
    "GLM-4.5": ("glm4_moe", LATENT | {"kv_lora_rank": None, "num_key_value_heads": 2}),
    "Nemotron": ("nemotron", {}),
    "EXAONE 4": ("exaone4", {"sliding_window": 24, "layer_types": SLIDING}),
    "Seed-OSS": ("seed_oss", {}),
    "ERNIE 4.5": ("ernie4_5", {}),
    "Falcon": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "head_dim": ...}),
    "GPT-2": ("gpt2", GPT),
    "GPT-J": ("gptj", GPT | {"rotary_dim": 8}),
    "GPT-NeoX (Pythia)": ("gpt_neox", {}),
    "OPT": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "BLOOM": ("bloom", {"n_layer": 2, "n_head": 4}),
    "MPT": ("mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 512}),
    "Mamba": ("mamba", {"state_size": 8}),
    "RWKV": ("rwkv", {"attention_hidden_size": 64, "context_length": 512}),
    "Jamba": ("jamba", {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1}),
    "LFM2": ("lfm2", {"layer_types": ["conv", "full_attention"]}),
    "DeepSeek-V2": ("deepseek_v2", LATENT),
    "DeepSeek-V3": ("deepseek_v3", LATENT),
    "gpt-oss": ("gpt_oss", {"num_local_experts": 4, "sliding_window": 24, "layer_types": SLIDING}),
    "T5": ("t5", {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}),
    "BERT": ("bert", {"pad_token_id": 0}),
}


@dataclass(frozen=True)
class Row:
    """The outcome of one case."""

    case: str
    outcome: str  # calibrated, refused or failed
    exit_status: int
    lines: int  # on standard error
    cpu_s: float  # of `calibrate`
    beyond_start_s: float  # of that, beyond what a command takes that is refused at once
    message: str  # the last line
    logits_differ: float | None = None  # largest difference of a log-probability
    exported: str | None = None
    verified: str | None = None
    wrong: str | None = None


@dataclass(frozen=True)
class Case:
    """A checkpoint (or not), and samples; `late` if config.json cannot show what is wrong."""

    name: str
    model: Path
    samples: Path
    late: bool = False


def write_model(path: Path, kind: str, settings: dict[str, Any]) -> Path:
    """Writes a random model of the type `kind` in BF16, with the example's tokenizer."""
    torch.manual_seed(0)
    keys = {key: value for key, value in (SIZES | settings).items() if value is not ...}
    config = transformers.AutoConfig.for_model(kind, **keys)
    makers = (
        transformers.AutoModelForSeq2SeqLM,
        transformers.AutoModelForMaskedLM,
        transformers.AutoModelForCausalLM,
    )
    maker = makers[{"t5": 0, "bert": 1}.get(kind, 2)]
    with _MAKING:
        model = maker.from_config(config)
    for name, parameter in model.named_parameters():  # so that none can be left out unnoticed
        if name.endswith("bias"):
            torch.nn.init.uniform_(parameter, -0.5, 0.5)
        elif "norm" in name or "ln_" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return save(model, path)


def save(model: Any, path: Path) -> Path:
    model.to(torch.bfloat16).save_pretrained(path)
    for file in EXAMPLE.glob("tokenizer*"):
        shutil.copy(file, path)
    return path


def write_vision_model(path: Path) -> Path:
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = transformers.LlavaConfig(
        vision_config={"model_type": "clip_vision_model", "num_attention_heads": 2, **vision},
        text_config={"model_type": "llama", **SIZES},
    )
    with _MAKING:
        model = transformers.LlavaForConditionalGeneration(config)
    return save(model, path)


def altered(source: Path, out: Path, **config: Any) -> Path:
    """Copies a checkpoint, and sets keys of its config.json."""
    shutil.copytree(source, out)
    before = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(before | config))
    return out


def models(root: Path, samples: Path, chosen: Callable[[str], bool]) -> Iterator[Case]:
    for name, (kind, settings) in MODELS.items():
        if chosen(name):
            path = root / "".join(x if x.isalnum() else "-" for x in name)
            yield Case(name, write_model(path, kind, settings), samples)
    if chosen("LLaVA"):
        yield Case("LLaVA", write_vision_model(root / "llava"), samples)


QUANTIZED: dict[str, dict[str, object]] = {
    "compressed-tensors FP8": {"quant_method": "compressed-tensors", "format": "float-quantized"},
    "GPTQ": {"quant_method": "gptq", "bits": 4},
    "AWQ": {"quant_method": "awq", "bits": 4},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "FP8 of DeepSeek and Qwen": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


def no_checkpoints(root: Path, samples: Path) -> Iterator[Case]:
    """Yields paths that are no checkpoint to quantize, each made of a Llama."""
    llama = write_model(root / "base", *MODELS["Llama"])
    for name, section in QUANTIZED.items():
        path = altered(llama, root / f"q-{section['quant_method']}", quantization_config=section)
        yield Case(name, path, samples)
    gguf = root / "model.Q4_K_M.gguf"
    gguf.write_bytes(b"GGUF\3\0\0\0" * 8)
    yield Case("GGUF file", gguf, samples)
    adapter = root / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    yield Case("PEFT adapter", adapter, samples)
    pickled = altered(llama, root / "pickled")
    (pickled / "model.safetensors").unlink()
    torch.save({}, pickled / "pytorch_model.bin")
    yield Case("pytorch_model.bin only", pickled, samples)
    pointer = altered(llama, root / "pointer")
    (pointer / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"
    )
    yield Case("Git LFS pointer", pointer, samples)
    cut = altered(llama, root / "cut")
    with (cut / "model.safetensors").open("r+b") as weights:
        weights.truncate(5000)
    yield Case("half-downloaded weights", cut, samples)
    broken = altered(llama, root / "broken")
    (broken / "config.json").write_text('{"architectures": [')
    yield Case("config.json cut off", broken, samples)
    yield Case("name on the Hub", Path("meta-llama/Llama-3.2-1B"), samples)
    (root / "empty").mkdir()
    yield Case("empty directory", root / "empty", samples)
    silent = altered(llama, root / "silent")
    for file in silent.glob("tokenizer*"):
        file.unlink()
    yield Case("no tokenizer", silent, samples, late=True)
    small = write_model(root / "small", "llama", {"vocab_size": 512})
    yield Case("tokenizer of another vocabulary", small, samples, late=True)
    other = altered(write_model(root / "qwen2", "qwen2", {}), root / "other")
    settings = json.loads((other / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "Qwen2Tokenizer"
    (other / "tokenizer_config.json").write_text(json.dumps(settings))
    yield Case("tokenizer class that differs from tokenizer.json", other, samples, late=True)


def sample_files(root: Path, lines: list[str]) -> Iterator[Case]:
    llama = write_model(root / "llama", *MODELS["Llama"])
    rows = [json.dumps({"text": line}) for line in lines]
    contents: dict[str, tuple[str, bytes]] = {
        "CSV": ("s.csv", b"text,label\nhello,1\nworld,0\n"),
        "CSV named .jsonl": ("csv.jsonl", b"text,label\nhello,1\nworld,0\n"),
        "JSON without a text": ("no-text.jsonl", b'{"prompt": "a", "id": 1}\n' * 200),
        "a JSON array": ("array.json", json.dumps([{"text": x} for x in lines]).encode()),
        "empty": ("empty.jsonl", b""),
        "not UTF-8": ("latin.txt", b"caf\xe9\n\n" * 200),
        "JSONL that is not UTF-8": ("latin.jsonl", b'{"text": "caf\xe9"}\n' * 200),
        "5 samples": ("five.jsonl", "\n".join(rows[:5]).encode()),
        "duplicate lines": ("twice.jsonl", "\n".join([rows[0]] * 200).encode()),
        "a ZIP file": ("s.zip", b"PK\3\4" + bytes(60)),
    }
    for name, (file, content) in contents.items():
        (root / file).write_bytes(content)
        yield Case(f"samples: {name}", llama, root / file)
    (root / "folder").mkdir()
    yield Case("samples: an empty directory", llama, root / "folder")
    yield Case("samples: missing", llama, root / "none.jsonl")
    yield Case("samples: unreadable", llama, Path("/proc/self/mem"))


def run(*arguments: object) -> tuple[int, list[str], float]:
    """Runs `octet`; returns its exit status, the lines of its errors, and CPU seconds."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "octet", *map(str, arguments)],
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        return process.returncode, errors.read().splitlines(), usage.ru_utime + usage.ru_stime


def outcome_of(case: Case, out: Path, start_s: float) -> Row:
    few = [] if case.name.startswith("samples: ") else ["--allow-few-samples", "-n", 8]
    options = ["--samples", case.samples, "--out", out, "--no-predict", *few]
    status, lines, spent = run("calibrate", case.model, *options)
    message = lines[-1] if lines else ""
    kind = {0: "calibrated", 2: "refused"}.get(status, "failed")
    fields = {"exit_status": status, "lines": len(lines), "cpu_s": round(spent, 2)}
    fields |= {"beyond_start_s": round(spent - start_s, 2)}
    if kind != "calibrated":
        wrong = "not one line" if len(lines) != 1 or kind == "failed" else None
        if wrong is None and spent - start_s > 1 and not case.late:
            wrong = "late"
        return Row(case.name, kind, message=message, wrong=wrong, **fields)  # type: ignore[arg-type]
    told = ("does not know", "tokenizer", "are distinct", "samples are few")
    notes = [x for x in lines if x.startswith("warning: ") and any(word in x for word in told)]
    found = difference(case.model, GoldenSet.load(out))
    status, lines, _ = run("export", "checkpoint", out, "--out", out.with_suffix(".exported"))
    export = "yes" if status == 0 else (lines or [""])[-1]
    verified = None
    if status == 0:
        status, lines, _ = run("verify", out.with_suffix(".exported"), "--calibration", out)
        verified = "yes" if status == 0 else (lines or [""])[-1]
    wrong = "logits differ" if found > 1e-3 else None
    wrong = wrong or ("not verified" if verified not in (None, "yes") else None)
    return Row(
        case.name,
        kind,
        message=" ".join(notes),
        logits_differ=found,
        exported=export,
        verified=verified,
        wrong=wrong,
        **fields,  # type: ignore[arg-type]
    )


def difference(path: Path, golden: GoldenSet) -> float:
    """Returns the largest difference of a golden log-probability from transformers' own."""
    with _MAKING:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, trust_remote_code=False
        )
    largest = 0.0
    for record in golden.records[:8]:
        ids = [*record.prompt_token_ids, *record.continuation_token_ids]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        for place, top in enumerate(record.tops):
            row = logits[len(record.prompt_token_ids) - 1 + place]
            expected = row[list(top.token_ids)] - torch.tensor(top.logprobs, dtype=torch.float64)
            largest = max(largest, float(expected.abs().max()))
    return largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="words of the cases to run")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    start_s = min(run("calibrate", "/none", "--samples", "x", "--out", "y")[2] for _ in range(3))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="octet-") as name:
        root = Path(name)
        texts = [json.loads(line)["text"] for line in lines_of_example()]
        samples = root / "samples.jsonl"
        samples.write_text("".join(json.dumps({"text": x[:200]}) + "\n" for x in texts[:8]))

        def chosen(case: str) -> bool:
            return not options.only or any(word in case for word in options.only)

        def cases() -> Iterator[Case]:
            yield from models(root, samples, chosen)
            more: tuple[Callable[[Path], Iterator[Case]], ...] = (
                lambda place: no_checkpoints(place, samples),
                lambda place: sample_files(place, [x[:200] for x in texts[:200]]),
            )
            for number, made in enumerate(more):
                place = root / str(number)
                place.mkdir()
                yield from (case for case in made(place) if chosen(case.name))

        with ThreadPoolExecutor(options.jobs) as pool:
            found = [
                pool.submit(outcome_of, case, root / f"out-{number}", start_s)
                for number, case in enumerate(cases())
            ]
            for row in found:
                rows.append(row.result())
                print(rows[-1].case, rows[-1].wrong or "", file=sys.stderr, flush=True)
    print_table(rows, name)
    card = conditions(machine=platform.machine(), torch_threads=1, start_cpu_s=round(start_s, 2))
    if options.output is not None:
        text = json.dumps({"conditions": card, "results": [asdict(x) for x in rows]}, indent=1)
        options.output.write_text(text.replace(name, "") + "\n")
    sys.exit(any(row.wrong for row in rows))


def lines_of_example() -> list[str]:
    path = EXAMPLE.parent / "samples" / "calibration.jsonl"
    return path.read_text().splitlines()


def print_table(rows: list[Row], root: str) -> None:
    print("| case | outcome | exit | lines | CPU s | beyond start | logits | export | message |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        logits = "" if row.logits_differ is None else f"{row.logits_differ:.1e}"
        export = row.exported or ""
        if row.exported == "yes":
            export = "verified" if row.verified == "yes" else f"exported; verify: {row.verified}"
        outcome = f"**{row.wrong}**" if row.wrong else row.outcome
        cells = [row.case, outcome, row.exit_status, row.lines, row.cpu_s, row.beyond_start_s]
        message = row.message.replace("|", r"\|")
        print(f"| {' | '.join(map(str, [*cells, logits, export, message]))} |".replace(root, ""))


if __name__ == "__main__":
    main()
