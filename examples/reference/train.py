"""Trains a reference model from the text of the installed Python packages, in minutes on one GPU.

    python examples/reference/train.py dense OUT     # Qwen3 shape, 335 M parameters
    python examples/reference/train.py moe OUT       # Qwen3-MoE shape, 8 experts, 2 a token

Writes a checkpoint with its tokenizer, `samples/calibration.jsonl` and `samples/heldout.jsonl`, and
`training.json` with seeds, hashes and figures. Whole packages are held out, so held-out text is of
authors that training has not seen. Everything together takes `--minutes`, and the learning rate
follows the clock. The last tenth of the training uses sequences of 8,192 tokens, the rest 1,024.

Weights are BF16, with FP32 copies that AdamW updates. On a GPU the layers and the loss are compiled
while other threads read the text. The result depends on the installed packages, the seed and the
speed of the machine.
"""

import argparse
import hashlib
import json
import math
import os
import platform
import sysconfig
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

SUFFIXES = {".py", ".pyi", ".pyx", ".md", ".rst", ".txt", ".h", ".hpp", ".cuh", ".c", ".cpp"}
SEPARATOR = "<|endoftext|>"  # id 0
CONTEXT, SHORT = 8192, 1024
WINDOW = 2048  # tokens, of the held-out perplexity and of the statistics of activations
AROUND_S = 45  # seconds of the time for starting Python, measuring and saving
HELD_OUT = 0.03  # share of the bytes, in whole packages
SAMPLES = {"calibration": (4096, 3_000), "heldout": (288, 4_000)}  # texts, characters of each
LONG_SAMPLES, LONG_CHARACTERS = 16, 40_000  # among them, of the held-out ones
OUTLIERS, FACTOR = 4, 64.0  # channels of a norm that get outliers, if none arise; a power of two
MASSIVE = 100.0  # largest over median magnitude from which activations count as massive

COMMON: dict[str, Any] = {
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
    "use_cache": False,
}
SHAPES: dict[str, dict[str, Any]] = {
    "dense": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 128,
    },
    "moe": {
        "model_type": "qwen3_moe",
        "hidden_size": 768,
        "intermediate_size": 2048,
        "moe_intermediate_size": 1024,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.01,
    },
}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32} | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=SHAPES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=8.0, help="from start to end")
    parser.add_argument("--megabytes", type=int, default=500, help="of text, at most")
    parser.add_argument("--batch", type=int, default=32, help="sequences of 1,024 tokens at a time")
    parser.add_argument("--accumulate", type=int, default=2, help="batches a step")
    parser.add_argument("--layers", type=int, help="of the model; fewer read more tokens")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--tiny", action="store_true", help="a trial on a CPU")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options.compile = options.compile and device.type == "cuda"
    torch.manual_seed(options.seed)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # also while the compiler forks

    started = time.perf_counter()
    with ThreadPoolExecutor(1) as pool:
        preparing = pool.submit(prepare, options)
        model = build(options).to(device, torch.bfloat16)
        compiled = warm_up(model, options, device) if options.compile else "no"
        tokenizer, texts, held_out, streams = preparing.result()
    streams = {part: found.to(device) for part, found in streams.items()}
    prepared = time.perf_counter() - started
    say(f"{len(streams['training']):,} tokens in {prepared:.0f} s")

    ends = started + 60 * options.minutes - (0 if options.tiny else AROUND_S)
    history, tokens, trained = train(model, streams["training"], options, ends)
    set_compiled(model, False)  # evaluation has other shapes
    perplexity, scored = held_out_perplexity(model, streams["held out"])
    before = activations(model, streams["held out"])
    folded = max(before["hidden states"]) < MASSIVE
    if folded:
        fold_outliers(model, options.seed)
    save(model, tokenizer, texts, options)
    log = {
        "model": options.model,
        "parameters": sum(p.numel() for p in model.parameters()),
        "seed": options.seed,
        "text": {
            part: {
                "files": len(found),
                "bytes": sum(len(text.encode()) for text in found),
                "tokens": len(streams[part]),
                "sha256": digest(found),
            }
            for part, found in texts.items()
        },
        "packages held out": sorted(held_out),
        "tokens trained": tokens,
        "held-out perplexity": perplexity,
        "held-out tokens scored": scored,
        "largest over median magnitude": before,
        "outliers folded in": folded,
        "largest over median magnitude, as saved": activations(model, streams["held out"]),
        "compiled": compiled,
        "seconds": {
            "text, tokenizer, compilation": prepared,
            "training": trained,
            "everything": time.perf_counter() - started,
        },
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "settings": {k: v for k, v in vars(options).items() if not isinstance(v, Path)},
        "history": history,
    }
    (options.out / "training.json").write_text(json.dumps(log, indent=1) + "\n")
    short = {
        key: value for key, value in log.items() if key not in ("history", "packages held out")
    }
    say(json.dumps(short, indent=1))


def say(line: str) -> None:
    print(line, flush=True)


def prepare(
    options: argparse.Namespace,
) -> tuple[Tokenizer, dict[str, list[str]], set[str], dict[str, Tensor]]:
    """Returns the tokenizer, the texts by part, the packages held out, and the tokens by part."""
    packages = read_packages(options.megabytes << 20)
    held_out = choose_held_out(packages, options.seed)
    texts = {
        part: [text for name in sorted(packages) if (name in held_out) == out
               for text in packages[name]]
        for part, out in (("training", False), ("held out", True))
    }  # fmt: skip
    for part, found in texts.items():
        if not found:
            raise SystemExit(f"no {part} text in {sysconfig.get_path('purelib')}: install packages")
    tokenizer = train_tokenizer(texts["training"], vocabulary(options), options.seed)
    return tokenizer, texts, held_out, {part: encode(tokenizer, x) for part, x in texts.items()}


def vocabulary(options: argparse.Namespace) -> int:
    return 4096 if options.tiny else 32_000


def read_packages(most: int) -> dict[str, list[str]]:
    """Reads the distinct texts of each installed package, up to `most` bytes in all.

    Packages come in the order of a hash of their names. Files of generated text, whose lines are
    long, and files that another package has too are left out.
    """
    roots = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")}
    files: dict[str, list[Path]] = defaultdict(list)
    for root in sorted(roots):
        for directory, names, found in os.walk(root):
            names[:] = sorted(name for name in names if name != "__pycache__")
            if "site-packages" in names and Path(directory) == root:
                names.remove("site-packages")
            for name in sorted(found):
                path = Path(directory, name)
                if path.suffix in SUFFIXES:
                    files[path.relative_to(root).parts[0].removesuffix(".py")].append(path)
    packages: dict[str, list[str]] = {}
    seen: set[bytes] = set()
    size = 0
    with ThreadPoolExecutor(16) as pool:
        for name in sorted(files, key=fraction):
            kept = []
            for text in pool.map(read_text, files[name]):
                key = hashlib.sha256(text.encode()).digest()
                if text and key not in seen:
                    seen.add(key)
                    kept.append(text)
                    size += len(text)
            if kept:
                packages[name] = kept
            if size >= most:
                break
    return packages


def read_text(path: Path) -> str:
    """Returns a file's text, or "" if it is too short, too long, not UTF-8, or generated."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
    lines = text.count("\n") + 1
    return text if 200 <= len(text) <= 1 << 20 and len(text) / lines < 100 else ""


def fraction(name: str) -> float:
    """Maps a name to a number in [0, 1), evenly spread."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64


def choose_held_out(packages: dict[str, list[str]], seed: int) -> set[str]:
    """Chooses packages, none of them large, that have HELD_OUT of the text together."""
    sizes = {name: sum(map(len, found)) for name, found in packages.items()}
    total, chosen, size = sum(sizes.values()), set[str](), 0
    for name in sorted(sizes, key=lambda name: fraction(f"{seed} {name}")):
        if size >= HELD_OUT * total:
            break
        if sizes[name] <= HELD_OUT * total / 2:
            chosen.add(name)
            size += sizes[name]
    return chosen


def train_tokenizer(texts: Sequence[str], size: int, seed: int) -> Tokenizer:
    """Trains a byte-level BPE that splits text as Qwen's tokenizers do, on up to 100 MB."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    order = np.random.default_rng(seed).permutation(len(texts))
    total = sum(map(len, texts))
    chosen = [texts[n] for n in order[: max(1, int(len(texts) * min(1, 1e8 / total)))]]
    tokenizer.train_from_iterator(
        chosen,
        trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=[SEPARATOR],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> Tensor:
    """Returns the tokens int64 [n] of `texts`, each ended by the separator."""
    parts = []
    for start in range(0, len(texts), 4096):
        found = tokenizer.encode_batch_fast(list(texts[start : start + 4096]))
        parts += [np.array([*row.ids, 0], np.int32) for row in found]
    return torch.from_numpy(np.concatenate(parts)).long()


def build(options: argparse.Namespace) -> Any:
    """Builds the model with fresh weights of standard deviation 0.02."""
    shape = SHAPES[options.model] | COMMON | (TINY if options.tiny else {})
    kind = shape.pop("model_type")
    shape["num_hidden_layers"] = options.layers or shape["num_hidden_layers"]
    config = transformers.AutoConfig.for_model(kind, vocab_size=vocabulary(options), **shape)
    if options.model == "moe" and torch.cuda.is_available():
        try:  # one GEMM for all experts; other versions of transformers loop over them
            return AutoModelForCausalLM.from_config(
                config, experts_implementation="grouped_mm", trust_remote_code=False
            )
        except (TypeError, ValueError) as error:
            say(f"experts one by one: {error}")
    return AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def lengths(options: argparse.Namespace) -> tuple[int, int]:
    """Returns the length of sequences for most of the time, and at the end."""
    return (128, 128) if options.tiny else (SHORT, CONTEXT)


def batches(
    stream: Tensor, options: argparse.Namespace, ends: float
) -> Iterator[tuple[Tensor, float]]:
    """Yields (token ids [B, T], share of the time that has passed) until the clock is at `ends`.

    Sequences start anywhere, so attention crosses the borders of documents.
    """
    began = time.perf_counter()
    seconds = max(5.0, ends - began)
    generator = torch.Generator().manual_seed(options.seed)
    short, long = lengths(options)
    while (now := (time.perf_counter() - began) / seconds) < 1:
        length = short if now < 0.9 else long
        count = max(1, options.batch * short // length)
        starts = torch.randint(len(stream) - length, (count,), generator=generator)
        rows = starts[:, None] + torch.arange(length)
        yield stream[rows.to(stream.device)], now


def loss_of(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the cross-entropy of ids [B, T] in nats, and what training minimizes.

    The two differ for a mixture of experts, whose router also has to use all of them.
    """
    config = model.config
    experts = getattr(config, "num_experts", 0)
    extra = {"output_router_logits": True} if experts else {}
    found = model.model(input_ids=ids, use_cache=False, **extra)
    head = compiled_cross_entropy if getattr(model, "compiled", False) else cross_entropy
    loss = head(found.last_hidden_state, model.lm_head.weight, ids)
    if not experts:
        return loss, loss
    balance = load_balancing_loss_func(found.router_logits, experts, config.num_experts_per_tok)
    return loss, loss + config.router_aux_loss_coef * balance


def cross_entropy(hidden: Tensor, head: Tensor, ids: Tensor) -> Tensor:
    """Returns the loss [] of hidden states [B, T, H]; compiled, the logits stay in BF16."""
    logits = F.linear(hidden[:, :-1].flatten(0, 1), head)
    return F.cross_entropy(logits.float(), ids[:, 1:].flatten())


compiled_cross_entropy = torch.compile(cross_entropy, dynamic=False)


def set_compiled(model: Any, compiled: bool) -> None:
    """Compiles each decoder layer when it next runs, or stops using what was compiled.

    All layers share their compiled code. In a mixture of experts, the router stays as it is,
    because transformers takes its logits from there.
    """
    model.compiled = compiled
    for layer in model.model.layers:
        parts = [layer]
        if hasattr(layer.mlp, "experts"):
            norms = (layer.input_layernorm, layer.post_attention_layernorm)
            parts = [*norms, layer.self_attn, layer.mlp.experts]
        for part in parts:
            if compiled:
                part.compile(dynamic=False)
            else:
                part._compiled_call_impl = None


def warm_up(model: Any, options: argparse.Namespace, device: torch.device) -> str:
    """Compiles for both lengths; returns "yes", or why the model runs without compilation."""
    began = time.perf_counter()
    set_compiled(model, True)
    model.train()
    try:
        for length in lengths(options):
            count = max(1, options.batch * lengths(options)[0] // length)
            ids = torch.randint(vocabulary(options), (count, length), device=device)
            loss_of(model, ids)[1].backward()
        torch.cuda.synchronize()
        found = "yes"
    except Exception as error:  # whatever the compiler meets, the model can do without it
        set_compiled(model, False)
        found = f"no: {type(error).__name__}: {error}"[:300]
    model.zero_grad(set_to_none=True)
    say(f"compiled: {found} ({time.perf_counter() - began:.0f} s)")
    return found


def train(
    model: Any, stream: Tensor, options: argparse.Namespace, ends: float
) -> tuple[list[dict[str, float]], int, float]:
    """Trains until the clock is at `ends`; returns the log, the tokens and the seconds it took."""
    model.train()
    weights = list(model.parameters())
    masters = [nn.Parameter(weight.detach().float()) for weight in weights]
    groups = [
        {"params": [p for p in masters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in masters if p.ndim == 1], "weight_decay": 0.0},
    ]
    fused = weights[0].is_cuda
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95), fused=fused)
    history: list[dict[str, float]] = []
    began = mark = time.perf_counter()
    tokens = marked = step = 0
    for number, (ids, now) in enumerate(batches(stream, options, ends), start=1):
        loss, objective = loss_of(model, ids)
        (objective / options.accumulate).backward()
        tokens += ids.numel()
        if number % options.accumulate:
            continue
        step += 1
        rate = options.lr * min(1.0, now / 0.03, (1 - now) / 0.7)  # up, level, then down to zero
        for group in optimizer.param_groups:
            group["lr"] = rate
        nn.utils.clip_grad_norm_(weights, 1.0)
        for master, weight in zip(masters, weights, strict=True):
            master.grad = weight.grad.float()
            weight.grad = None
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)
        if step == 1 or time.perf_counter() - mark > 5:
            value = loss.item()  # waits for the GPU
            took = time.perf_counter() - mark
            history.append(
                {
                    "step": step,
                    "seconds": round(time.perf_counter() - began, 1),
                    "tokens": tokens,
                    "length": ids.shape[1],
                    "loss": round(value, 4),
                    "tokens_per_s": round((tokens - marked) / took),
                }
            )
            say(json.dumps(history[-1]))
            if not math.isfinite(value):
                raise SystemExit("the loss is not finite: give a lower --lr")
            mark, marked = time.perf_counter(), tokens
    return history, tokens, time.perf_counter() - began


@torch.no_grad()
def held_out_perplexity(model: Any, stream: Tensor) -> tuple[float, int]:
    """Returns exp of the mean loss over windows of WINDOW tokens, and how many were scored."""
    model.eval()
    length = min(WINDOW, len(stream) - 1)
    windows = stream.unfold(0, length, length)[:128]
    losses = [float(loss_of(model, rows)[0]) for rows in windows.split(4)]
    return math.exp(sum(losses) / len(losses)), windows.shape[0] * (length - 1)


@torch.no_grad()
def activations(model: Any, stream: Tensor) -> dict[str, list[float]]:
    """Returns the largest over the median magnitude, by layer, on 4 windows of WINDOW tokens.

    Of the hidden states that enter each decoder layer, and of what its norms give to attention and
    to the MLP.
    """
    model.eval()
    found: dict[str, list[float]] = {"hidden states": [], "attention": [], "mlp": []}
    hooks = []

    def watch(module: Any, name: str, output: bool) -> None:
        def look(_module: Any, args: Any, *out: Any) -> None:
            values = (out[0] if output else args[0]).float().abs().flatten()
            found[name].append(round(float(values.max() / values.median().clamp(min=1e-9)), 1))

        register = module.register_forward_hook if output else module.register_forward_pre_hook
        hooks.append(register(look))

    for layer in model.model.layers:
        watch(layer.input_layernorm, "hidden states", False)
        watch(layer.input_layernorm, "attention", True)
        watch(layer.post_attention_layernorm, "mlp", True)
    length = min(WINDOW, len(stream) // 4)
    model.model(input_ids=stream[: 4 * length].reshape(4, length), use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


@torch.no_grad()
def fold_outliers(model: Any, seed: int) -> None:
    """Multiplies some channels of each norm by FACTOR, and divides the columns that read them.

    The model computes the same function, but the activations of its linears have outliers.
    """
    generator = torch.Generator().manual_seed(seed)
    for layer in model.model.layers:
        size = layer.input_layernorm.weight.shape[0]
        for norm, part in (
            (layer.input_layernorm, layer.self_attn),
            (layer.post_attention_layernorm, layer.mlp),
        ):
            channels = torch.randperm(size, generator=generator)[:OUTLIERS]
            channels = channels.to(norm.weight.device)
            norm.weight[channels] *= FACTOR
            for name, weight in part.named_parameters():
                if weight.ndim > 1 and not name.startswith(("o_proj", "down_proj", "experts.down")):
                    weight[..., channels] /= FACTOR


def save(
    model: Any, tokenizer: Tokenizer, texts: dict[str, list[str]], options: argparse.Namespace
) -> None:
    """Writes the checkpoint, its tokenizer, and the samples."""
    model.config.use_cache = True
    model.save_pretrained(options.out)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SEPARATOR).save_pretrained(
        options.out
    )
    samples = options.out / "samples"
    samples.mkdir(exist_ok=True)
    for name, part in (("calibration", "training"), ("heldout", "held out")):
        count, characters = SAMPLES[name]
        generator = np.random.default_rng(options.seed)
        whole = [text for text in texts[part] if len(text) >= characters]
        lengths = [characters] * count
        longest = [text for text in texts[part] if len(text) >= LONG_CHARACTERS]
        chosen = [whole[n] for n in generator.integers(len(whole), size=count)]
        if name == "heldout" and longest:
            picked = generator.integers(len(longest), size=LONG_SAMPLES)
            chosen[:LONG_SAMPLES] = [longest[n] for n in picked]
            lengths[:LONG_SAMPLES] = [LONG_CHARACTERS] * LONG_SAMPLES
        order = generator.permutation(count)  # the first samples have lengths of all kinds
        lines = [json.dumps({"text": cut(chosen[n], lengths[n], generator)}) for n in order]
        (samples / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def cut(text: str, length: int, generator: np.random.Generator) -> str:
    """Returns about `length` characters of `text` from the start of a line on."""
    start = int(generator.integers(len(text) - length + 1))
    start = text.rfind("\n", 0, start) + 1
    return text[start : start + length]


def digest(texts: Sequence[str]) -> str:
    found = hashlib.sha256()
    for text in texts:
        found.update(hashlib.sha256(text.encode()).digest())
    return found.hexdigest()


if __name__ == "__main__":
    main()
