"""Measures a graph's or an engine's own cost on golden prompts: `export onnx`, `build-engine`.

Prefill of every prompt gives logits at every token; they are compared with the original's in
float32. The metrics and their clustering by prompt are those of a simulation
(`calibrate.quality.golden_cost`). The last tokens of each prompt are also decoded, in batches. They
are too few for a bound of their own. But decode and prefill of the same tokens differ only by
rounding, so the cost of decode is estimated as that of prefill plus the measured difference:
θ = Σ prefill / M + Σ (decode - prefill) / D, over M tokens of prefill and D decoded tokens. Each
prompt contributes its sum of the first, plus M/D times its sum of the second. Their ratio mean over
all M tokens is θ, with a bound like any other. A limit is compared with the higher of the two
bounds, of prefill and of decode.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from calibrate.decoder.layers import LayeredModel
from calibrate.quality.divergence import Advance, Divergence, Sums, Tally
from calibrate.quality.gate import Gate, Outcome
from calibrate.quality.golden_cost import ON, distinct_prompts
from calibrate.samples.batches import Batch, make_batches
from octet.artifacts.golden import GoldenSet
from octet.model.checkpoint import Checkpoint
from octet.progress import progress_bar

__all__ = ["Runs", "judge_answers", "measure_answers"]

_BATCH = 8  # prompts of similar length
_ROW_ELEMENTS = 1 << 24  # logits of each model at a time


class Runs(Protocol):
    """The graph or engine under test; it runs at most `together` prompts at once."""

    together: int

    def every(self, tokens: Sequence[int]) -> Iterator[NDArray[np.float32]]:
        """Yields logits [T, V] of every position, in chunks; each is valid until the next."""

    def decoded(self, prompts: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """Returns decoded logits [d, V] of the last d tokens of each prompt; d may be 0."""


def judge_answers(
    gate: Gate,
    checkpoint: Checkpoint,
    golden: GoldenSet,
    runs: Runs,
    who: str,
    *,
    longest: int,
    device: torch.device | str = "cpu",
    console: Console | None = None,
) -> Outcome:
    """Judges the cost of `runs`, named `who`, on prompts of at most `longest` tokens.

    Raises ConfigError if there are too few such prompts for a bound, and NumericsError for NaN or
    Inf.
    """
    prompts = [prompt for prompt in distinct_prompts(golden) if len(prompt) <= longest]
    remedy = "make it for longer sequences (--max-length), or leave the limit out"
    gate.check_samples(list(map(len, prompts)), f"{ON} that fit into its context", remedy)
    with progress_bar(console, "Gate", sum(map(len, prompts))) as advance:
        ways = measure_answers(checkpoint, prompts, runs, device=device, advance=advance)
    outcomes = [
        gate.judge(cost, ON, f"{who}, {way}")
        for cost, way in zip(ways, ("reading", "decoding"), strict=True)
    ]
    pairs = zip(*(outcome.judged for outcome in outcomes), strict=True)
    return Outcome(tuple(max(pair, key=lambda judged: judged.bound) for pair in pairs))


@torch.inference_mode()
def measure_answers(
    checkpoint: Checkpoint,
    prompts: Sequence[list[int]],
    runs: Runs,
    *,
    device: torch.device | str = "cpu",
    advance: Advance = lambda tokens: None,
) -> tuple[Divergence, Divergence]:
    """Measures prefill and decode. `advance` receives the tokens of all prompts in total."""
    original = LayeredModel(checkpoint.unchanged(), "float32", device)
    batches = make_batches(prompts, [""] * len(prompts), batch_size=_BATCH)
    states = [original.embed(batch.token_ids) for batch in batches]
    for _ in original.sweep():
        states = [original.forward(x, None) for x in states]
    found = _Found(original, runs)
    for batch, hidden in zip(batches, states, strict=True):
        found.add(batch, hidden)
        advance(batch.tokens)
    return found.reading.divergence(), found.decoding()


class _Found:
    """Collects the cost of prefill at every token, and of prefill and decode at the last tokens."""

    def __init__(self, original: LayeredModel, runs: Runs) -> None:
        self._original, self._runs = original, runs
        self._rows = max(1, _ROW_ELEMENTS // original.spec.vocab_size)
        self.reading = Tally()
        self._tail_read, self._tail_decoded = Tally(), Tally()
        self._tails: list[bool] = []  # for each prompt, True if some of its tokens are decoded

    def add(self, batch: Batch, hidden: Tensor) -> None:
        """Adds a batch; `hidden` [B, T, H] are the original's last hidden states."""
        prompts = [row[:n].tolist() for row, n in zip(batch.token_ids, batch.lengths, strict=True)]
        for start in range(0, len(prompts), self._runs.together):
            group = prompts[start : start + self._runs.together]
            for ids, decoded, before in zip(
                group, self._runs.decoded(group), hidden[start : start + len(group)], strict=True
            ):
                self._prompt(ids, before[: len(ids)], torch.from_numpy(decoded))

    def _prompt(self, ids: list[int], before: Tensor, decoded: Tensor) -> None:
        tail = len(decoded)
        kept: list[Tensor] = []
        self.reading.add(_one(ids), self._pairs(ids, before, kept, tail))
        self._tails.append(tail > 0)
        if tail:
            ours = self._logits(before[-tail:]).cpu()
            last = torch.cat(kept)[-tail:]
            self._tail_read.add(_one(ids[-tail:]), [(ours, last)])
            self._tail_decoded.add(_one(ids[-tail:]), [(ours, decoded)])

    def _pairs(
        self, ids: list[int], before: Tensor, kept: list[Tensor], tail: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields both models' logits at every token; keeps the last `tail` of prefill in `kept`."""
        done = 0
        for chunk in self._runs.every(ids):
            for start in range(0, len(chunk), self._rows):
                now = torch.from_numpy(chunk[start : start + self._rows].copy())
                ours = self._logits(before[done : done + len(now)]).cpu()
                done += len(now)
                left = len(ids) - done  # tokens still to come
                if left < tail:
                    kept.append(now[-min(len(now), tail - left) :].clone())
                yield ours, now

    def _logits(self, rows: Tensor) -> Tensor:
        found: Tensor = self._original.logits([rows[None]])[0][0]
        return found

    def decoding(self) -> Divergence:
        """Estimates the cost of decode by the formula of the module docstring."""
        read, whole = self.reading.sums(), self.reading.divergence()
        if not any(self._tails):
            return whole
        ours, theirs = self._tail_read.sums(), self._tail_decoded.sums()
        has = np.array(self._tails)
        kl = read.kl.copy()
        kl[has] += (theirs.kl - ours.kl) * (read.tokens.sum() / ours.tokens.sum())
        change = read.change.copy()
        if ours.predicted.sum():
            factor = read.predicted.sum() / ours.predicted.sum()
            change[has] += (theirs.change - ours.change) * factor
        sums = Sums(kl, read.tokens, change, read.predicted)
        figures: dict[str, Any] = sums.figures()
        return replace(whole, **figures)


def _one(ids: Sequence[int]) -> Batch:
    """Returns a batch of one sample."""
    return Batch(torch.tensor([list(ids)]), (len(ids),), ("",))
