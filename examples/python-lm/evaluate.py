"""Measure the example model's held-out loss on the CPU and print completions.

    python examples/python-lm/evaluate.py
    python examples/python-lm/evaluate.py --model DIR --dtype float32 --limit 16
    python examples/python-lm/evaluate.py --record --completions

The loss is the mean cross-entropy in nats over every predicted token of `samples/heldout.jsonl`:
each sample is encoded alone, without a beginning or end token, its first token is context only,
and long samples weigh more than short ones (a mean over tokens, not over samples). The perplexity
is exp(loss). `--dtype bfloat16`, the default, computes in the stored precision; `float32` widens
the stored weights.
"""

import argparse
import json
import math
from pathlib import Path

import torch
import transformers
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

HERE = Path(__file__).resolve().parent
PROMPTS = [
    "def fibonacci(n):\n",
    "import os\n",
    "class Stack:\n    def __init__(self",
    'def read_json(path):\n    """',
    "    def test_split(self):\n        ",
]


def read_samples(path: Path, limit: int | None = None) -> list[str]:
    """Read the texts of a JSONL sample file."""
    lines = path.read_text(encoding="utf-8").splitlines()[:limit]
    return [json.loads(line)["text"] for line in lines]


@torch.inference_mode()
def heldout_loss(model: PreTrainedModel, samples: list[list[int]]) -> tuple[float, int]:
    """Return (mean loss in nats, number of predicted tokens) over samples of token ids."""
    total, count = 0.0, 0
    for sample in samples:
        ids = torch.tensor([sample])  # [1, T]
        logits = model(input_ids=ids).logits[0, :-1].float()  # [T - 1, vocab]
        total += F.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
        count += len(sample) - 1
    return total / count, count


def record(loss: float, count: int, samples: int, dtype: str) -> None:
    """Write the figure, with its conditions, under "heldout" in training.json."""
    path = HERE / "training.json"
    log = json.loads(path.read_text())
    log["heldout"] = {
        "loss": round(loss, 4),
        "perplexity": round(math.exp(loss), 4),
        "samples": samples,
        "predicted_tokens": count,
        "conditions": f"CPU, {dtype}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}; see evaluate.py",
    }
    path.write_text(json.dumps(log, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=HERE / "model")
    parser.add_argument("--samples", type=Path, default=HERE / "samples" / "heldout.jsonl")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--limit", type=int, default=None, help="first samples only")
    parser.add_argument("--record", action="store_true", help="write into training.json")
    parser.add_argument("--completions", action="store_true", help="print completions as well")
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=args.dtype, trust_remote_code=False
    ).eval()
    texts = read_samples(args.samples, args.limit)
    loss, count = heldout_loss(model, [tokenizer(text).input_ids for text in texts])
    print(
        f"{len(texts)} samples, {count} predicted tokens, {args.dtype}: "
        f"loss {loss:.4f}, perplexity {math.exp(loss):.4f}"
    )
    if args.record:
        record(loss, count, len(texts), args.dtype)
    if not args.completions:
        return
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")
        for title, options in (
            ("greedy", {"do_sample": False}),
            ("temperature 0.7", {"do_sample": True, "temperature": 0.7, "top_p": 0.95}),
        ):
            torch.manual_seed(0)
            tokens = model.generate(**ids, max_new_tokens=64, **options)[0]
            print(f"\n--- {title}\n{tokenizer.decode(tokens)}")


if __name__ == "__main__":
    main()
