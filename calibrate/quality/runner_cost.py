"""What a graph or an engine itself costs on the golden prompts: `export onnx` and `build-engine`.

It reads every prompt, and its answer at every token is compared with that of the original in
float32: the same figures, clustered by prompt in the same way, as a simulation has
(`calibrate.quality.golden_cost`). The last tokens of each prompt are decoded as well, in company.
They are too few to bound anything by themselves. But what decoding them costs more than reading
them is nought but for another rounding, so decoding in all is taken to cost what reading does and
that difference: θ = Σ read / M + Σ (decoded - read) / D, over M tokens that are read and D that are
decoded. Each prompt's part of it is its sum of the first and M/D times that of the second, whose
ratio mean over all M tokens is θ, with a bound as any other has. Reading or decoding, whichever has
the higher bound, is held against a limit.
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
_ROW_ELEMENTS = 1 << 24  # logits of each side at a time


class Runs(Protocol):
    """Who is asked, a batch of `together` prompts at most."""

    together: int

    def every(self, tokens: Sequence[int]) -> Iterator[NDArray[np.float32]]:
        """Logits [T, V] of every position, some at a time: each valid until the next."""

    def decoded(self, prompts: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """Logits [d, V] of the last d tokens of each prompt; d may be 0."""


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
    """What `runs`, called `who`, costs, held against every limit. Prompts are `longest` at most.

    ConfigError if too few of them are to bound anything, NumericsError for NaN or Inf.
    """
    prompts = [prompt for prompt in distinct_prompts(golden) if len(prompt) <= longest]
    remedy = "make it for longer sequences (--max-length), or leave the limit out"
    gate.check_samples(list(map(len, prompts)), f"{ON} that fit into its context", remedy)
    with progress_bar(console, "Gate", sum(map(len, prompts))) as advance:
        ways = measure_answers(checkpoint, prompts, runs, device=device, advance=advance)
    told = [
        gate.judge(cost, ON, f"{who}, {way}")
        for cost, way in zip(ways, ("reading", "decoding"), strict=True)
    ]
    pairs = zip(*(outcome.judged for outcome in told), strict=True)
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
    """Reading, and decoding. `advance` is told the tokens of the prompts in all."""
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
    """What reading every token costs; of the last tokens, what reading and what decoding does."""

    def __init__(self, original: LayeredModel, runs: Runs) -> None:
        self._original, self._runs = original, runs
        self._rows = max(1, _ROW_ELEMENTS // original.spec.vocab_size)
        self.reading = Tally()
        self._tail_read, self._tail_decoded = Tally(), Tally()
        self._tails: list[bool] = []  # of each prompt, whether it has one

    def add(self, batch: Batch, hidden: Tensor) -> None:
        """The original's last hidden states [B, T, H]."""
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
        """Logits of both at every token; the last `tail` of those that are read go to `kept`."""
        done = 0
        for chunk in self._runs.every(ids):
            for start in range(0, len(chunk), self._rows):
                now = torch.from_numpy(chunk[start : start + self._rows].copy())
                ours = self._logits(before[done : done + len(now)]).cpu()
                done += len(now)
                left = len(ids) - done  # tokens that are yet to come
                if left < tail:
                    kept.append(now[-min(len(now), tail - left) :].clone())
                yield ours, now

    def _logits(self, rows: Tensor) -> Tensor:
        found: Tensor = self._original.logits([rows[None]])[0][0]
        return found

    def decoding(self) -> Divergence:
        """As the module says."""
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
    """Of one sample."""
    return Batch(torch.tensor([list(ids)]), (len(ids),), ("",))
