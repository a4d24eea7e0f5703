"""Held-out perplexity of an ONNX export or an engine, as the embedded engine would serve it.

Each sample is read by itself through the cache, in the engine's own chunks, so keys and values are
rounded as they are in service. The definition is that of the calibration stage's reference: tokens
1 to T-1 of each sample, given those before.
"""

import json
import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from octet.errors import NumericsError, SampleError
from serve.cache import Slots
from serve.runner import CHUNK, Runner, StepBatch, load_runner
from serve.sampler import log_softmax
from serve.tokenizer import Tokenizer

__all__ = ["Perplexity", "perplexity", "teacher_forced"]


@dataclass(frozen=True)
class Perplexity:
    """Negative log-likelihood in nats, summed over `tokens` predicted tokens."""

    nll_sum: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll_sum / self.tokens)


def perplexity(
    export: Path,
    samples: Path,
    *,
    count: int | None = None,
    text_field: str = "text",
    max_length: int = 512,
    threads: int = 0,
    console: Console | None = None,
) -> Perplexity:
    """Perplexity per token over the first `count` samples with any text (all if None).

    `max_length` cuts each sample, in tokens; so does the model's context. Raises ArtifactError for
    what is neither, SampleError for samples that are missing, malformed or too short to
    predict anything, NumericsError for NaN or Inf.
    """
    texts = list(_texts(samples, text_field))[:count]
    runner, tokenizer = load_runner(export, threads), Tokenizer.load(export)
    length = min(max_length, runner.spec.max_positions)
    sequences = [ids for text in texts if len(ids := tokenizer.encode(text)[:length]) > 1]
    if not sequences:
        raise SampleError(f"{samples}: no sample has two tokens, so none predicts anything")
    cache = runner.new_cache(1, length)
    nll_sum, tokens = 0.0, 0
    progress = _progress(console)
    with progress or nullcontext():
        task = progress.add_task("Scoring", total=len(sequences)) if progress else None
        for ids in sequences:
            following = 1
            for logits in teacher_forced(runner, cache, ids):
                targets = ids[following : following + len(logits)]
                logprobs = log_softmax(logits[: len(targets)])
                nll_sum -= float(logprobs[np.arange(len(targets)), targets].sum())
                following += len(logits)
            tokens += len(ids) - 1
            if progress and task is not None:
                progress.advance(task)
    if not math.isfinite(nll_sum):
        raise NumericsError(f"{export}: the log-likelihood is not finite: NaN or Inf in the model")
    return Perplexity(nll_sum, tokens)


def teacher_forced(runner: Runner, cache: Slots, ids: list[int]) -> Iterator[NDArray[np.float32]]:
    """Logits float32 [T, V] of every position of `ids`, chunk by chunk.

    Uses a free slot of `cache`. Each array is valid until the next is asked for.
    """
    slot = cache.acquire()
    assert slot is not None
    try:
        for start in range(0, len(ids), CHUNK):
            tokens = np.array([ids[start : start + CHUNK]], np.int64)
            step = StepBatch(tokens, [slot], np.arange(tokens.shape[1])[None])
            yield runner.forward(step, cache)[0]
    finally:
        cache.release(slot)


def _texts(path: Path, field: str) -> Iterator[str]:
    """The texts of a JSONL file that are not blank."""
    try:
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise SampleError(f"{path}: {reason}") from None
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)[field]
        except (ValueError, KeyError, TypeError):
            raise SampleError(
                f"{path}, line {number}: not a JSON object with the field '{field}'"
                " (--text-field chooses)"
            ) from None
        if not isinstance(text, str):
            raise SampleError(f"{path}, line {number}: '{field}' is not a string")
        if text.strip():
            yield text


def _progress(console: Console | None) -> Progress | None:
    if console is None:
        return None
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, transient=True)
