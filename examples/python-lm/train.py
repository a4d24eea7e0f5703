"""Train the example model: a 6.9 M parameter Llama on the token arrays that `prepare.py` wrote.

    python examples/python-lm/train.py                  # some minutes on one GPU
    python examples/python-lm/train.py --device cpu --epochs 1   # slow, the same code

A plain loop: FP32 weights under BF16 autocast, AdamW, a linear warm-up and a cosine decay to zero.
The stream is cut into windows of 1,024 tokens, at other lines in each epoch; documents follow each
other with a separator between them, and attention crosses it. Dropout on what each block adds to
the residual stream, and weight decay, hold the overfitting of many epochs back.

Writes the checkpoint with the lowest validation loss, in BF16, and `training.json` with the
figures of the run. The result depends on the seed, and in the last digits on the GPU.
"""

import argparse
import json
import math
import platform
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).resolve().parent
DATA = HERE.parents[1] / ".data" / "python-lm"
SEPARATOR_ID = 0
CONTEXT = 1024


def build_model(dropout: float) -> LlamaForCausalLM:
    """Build the model with fresh FP32 weights."""
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=SEPARATOR_ID,
        pad_token_id=None,  # padding would freeze the separator's embedding
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    if dropout:
        for layer in model.model.layers:
            for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
                projection.register_forward_hook(
                    lambda module, _, out: F.dropout(out, dropout, module.training)
                )
    return model


def line_starts(stream: Tensor, newline_id: int) -> Tensor:
    """Return the positions int64 [lines] of the first token of each line with a full window."""
    after = (stream == newline_id) | (stream == SEPARATOR_ID)
    return after[: -CONTEXT - 1].nonzero().flatten() + 1


def windows(
    stream: Tensor, lines: Tensor, batch: int, epochs: int, generator: torch.Generator
) -> Iterator[Tensor]:
    """Yield token ids int64 [batch, CONTEXT + 1], each epoch cut at another offset and shuffled.

    A window begins at the next line: were the indentation of its first line cut off, the model
    would learn that a prompt's first column says nothing about its indentation.
    """
    span = torch.arange(CONTEXT + 1, device=stream.device)
    for _ in range(epochs):
        offset = int(torch.randint(CONTEXT, (1,), generator=generator))
        count = (int(lines[-1]) - offset) // CONTEXT
        starts = torch.randperm(count, generator=generator) * CONTEXT + offset
        for chosen in starts.split(batch):
            if len(chosen) == batch:
                first = lines[torch.searchsorted(lines, chosen.to(lines.device))]  # [batch]
                yield stream[first[:, None] + span]


def token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the mean next-token cross-entropy (nats) of ids int64 [B, T + 1], a scalar."""
    logits = model(input_ids=ids[:, :-1]).logits  # [B, T, vocab]
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def validate(model: nn.Module, loss_of: nn.Module, stream: Tensor, batch: int) -> float:
    """Return the mean loss over the stream's full windows of CONTEXT + 1 tokens."""
    model.eval()
    count = (len(stream) - 1) // CONTEXT
    ids = stream.unfold(0, CONTEXT + 1, CONTEXT)[: count // batch * batch]
    losses = [loss_of(model, rows).item() for rows in ids.split(batch)]
    model.train()
    return sum(losses) / len(losses)


def optimizer_for(model: nn.Module, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """Build AdamW that decays the matrices and leaves the norms alone."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": weight_decay},
        {"params": [p for p in model.parameters() if p.ndim != 2], "weight_decay": 0.0},
    ]
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=fused)


def save(model: LlamaForCausalLM, weights: dict[str, Tensor], folder: Path) -> None:
    """Write config.json, generation_config.json and the weights as BF16 safetensors."""
    model.load_state_dict(weights)
    model.config.use_cache = True
    model.config.pad_token_id = SEPARATOR_ID
    model.generation_config = GenerationConfig(eos_token_id=SEPARATOR_ID, pad_token_id=SEPARATOR_ID)
    model.to(torch.bfloat16).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--out", type=Path, default=HERE / "model")
    parser.add_argument("--log", type=Path, default=HERE / "training.json")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--max-steps", type=int, default=None, help="stop early, for a trial")
    parser.add_argument("--batch", type=int, default=64, help="windows of 1,024 tokens a step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=2.0)
    parser.add_argument("--dropout", type=float, default=0.15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=None)
    args = parser.parse_args()

    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    compiled = device == "cuda" if args.compile is None else args.compile
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    generator = torch.Generator().manual_seed(args.seed)
    train, validation = (
        torch.from_numpy(np.load(args.data / name).astype(np.int64)).to(device)
        for name in ("train.npy", "validation.npy")
    )
    tokenizer = Tokenizer.from_file(str(HERE / "model" / "tokenizer.json"))
    lines = line_starts(train, tokenizer.encode("\n").ids[0])
    model = build_model(args.dropout).to(device).train()
    parameters = sum(p.numel() for p in model.parameters())
    optimizer = optimizer_for(model, args.lr, args.weight_decay)
    loss_of = torch.compile(token_loss) if compiled else token_loss
    autocast = torch.autocast(device, torch.bfloat16) if device == "cuda" else nullcontext()

    per_epoch = (int(lines[-1]) // CONTEXT - 1) // args.batch
    total = min(args.max_steps or math.inf, per_epoch * args.epochs)
    warmup = min(200, total // 10)
    every = max(1, total // 40)
    best, best_step, best_weights = math.inf, 0, {}
    history = []
    began = time.perf_counter()
    mark, mark_step = time.perf_counter(), 0
    for step, ids in enumerate(windows(train, lines, args.batch, args.epochs + 1, generator), 1):
        rate = step / warmup if step <= warmup else 0.5 * (
            1 + math.cos(math.pi * (step - warmup) / (total - warmup))
        )  # fmt: skip
        for group in optimizer.param_groups:
            group["lr"] = args.lr * rate
        with autocast:
            loss = loss_of(model, ids)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % every == 0 or step == total:
            train_loss = loss.item()  # waits for the device
            speed = (step - mark_step) * args.batch * CONTEXT / (time.perf_counter() - mark)
            with autocast:
                held_back = validate(model, loss_of, validation, args.batch)
            if held_back < best:
                best, best_step = held_back, step
                best_weights = {k: v.detach().clone() for k, v in model.state_dict().items()}
            history.append(
                {
                    "step": step,
                    "train_loss": round(train_loss, 4),
                    "validation_loss": round(held_back, 4),
                    "tokens_per_s": round(speed),
                }
            )
            print(json.dumps(history[-1]), flush=True)
            mark, mark_step = time.perf_counter(), step
        if step == total:
            break

    wall_s = time.perf_counter() - began
    save(model, best_weights, args.out)
    log = {
        "parameters": parameters,
        "best_step": best_step,
        "steps": total,
        "validation_loss": round(best, 4),
        "validation_perplexity": round(math.exp(best), 3),
        "tokens_seen": total * args.batch * CONTEXT,
        "training_tokens": len(train),
        "validation_tokens": len(validation),
        "wall_s": round(wall_s, 1),
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "settings": {
            key: value for key, value in vars(args).items() if not isinstance(value, Path)
        },
        "compiled": compiled,
        "conditions": "FP32 weights, BF16 autocast on a GPU; validation dropout off, "
        "windows of 1,024 tokens of the calibration files; wall_s includes compilation "
        "and validation",
        "history": history,
    }
    args.log.write_text(json.dumps(log, indent=2) + "\n")


if __name__ == "__main__":
    main()
