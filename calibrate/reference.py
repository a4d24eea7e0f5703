"""Held-out perplexity of a checkpoint as stored: what quantized models are compared with."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console

from calibrate.batches import make_batches, tokenize
from calibrate.loading import load_model, load_tokenizer, resolve_dtype
from calibrate.progress import progress_bar
from calibrate.samples import load_samples
from octet.checkpoint import Checkpoint
from octet.errors import NumericsError, SampleError

__all__ = ["Perplexity", "perplexity"]


@dataclass(frozen=True)
class Perplexity:
    """Sum of negative log-likelihoods (nats) over `tokens` predicted tokens."""

    nll_sum: float
    tokens: int
    compute_dtype: str  # of the arithmetic; the weights are those of the checkpoint

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll_sum / self.tokens)


def perplexity(
    model_dir: Path,
    samples: Path,
    *,
    count: int | None = None,
    text_field: str = "text",
    max_length: int = 512,
    batch_size: int = 8,
    dtype: Literal["auto", "bfloat16", "float32"] = "float32",
    console: Console | None = None,
) -> Perplexity:
    """Perplexity per token over the first `count` samples (all if None).

    Each sample is scored by itself: tokens 1 to T-1 given those before, T at most `max_length` and
    the model's context. SampleError if no sample has two tokens.
    """
    checkpoint = Checkpoint.open(model_dir)
    chosen, _ = load_samples(samples, text_field).first(count)
    tokenizer = load_tokenizer(checkpoint)
    spec = checkpoint.spec
    length = min(max_length, spec.max_positions)
    sequences = tokenize(chosen, tokenizer, max_length=length, vocab_size=spec.vocab_size)
    long = [(ids, s.origin) for ids, s in zip(sequences, chosen, strict=True) if len(ids) > 1]
    if not long:
        raise SampleError(f"{samples}: no sample has two tokens, so none predicts anything")
    batches = make_batches(
        [ids for ids, _ in long], [origin for _, origin in long], batch_size=batch_size
    )
    compute_dtype = resolve_dtype(dtype, checkpoint)
    model = load_model(checkpoint, compute_dtype)
    nll_sum, tokens = 0.0, 0
    with progress_bar(console, "Scoring", sum(batch.tokens for batch in batches)) as advance:
        for batch in batches:
            with torch.inference_mode():
                logits = model(batch.token_ids, use_cache=False).logits
            for row, ids, size in zip(logits, batch.token_ids, batch.lengths, strict=True):
                nll = torch.nn.functional.cross_entropy(
                    row[: size - 1].float(), ids[1:size], reduction="none"
                )
                nll_sum += float(nll.double().sum())
                tokens += size - 1
            advance(batch.tokens)
    if not math.isfinite(nll_sum):
        raise NumericsError(f"{model_dir}: the log-likelihood is not finite: NaN or Inf in weights")
    return Perplexity(nll_sum, tokens, compute_dtype)
