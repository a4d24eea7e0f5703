"""Calibrates layer by layer: all batches through one decoder layer, then through the next.

    embeddings ─▶ layer 0 ─▶ activations ─▶ layer 1 ─▶ activations ─▶ ...
                     │ counts                  │ counts
                     ▼                         ▼
                histograms, journal       histograms, journal

Memory holds the weights of one layer and one set of activations (or, spilled, those of one batch).
A continued run recomputes, without counting, the finished layers after the activations that the
journal has kept. The histograms equal, bin for bin, those of the whole model in memory: see
`calibrate.decoder.layers`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from calibrate.decoder.layers import LayeredModel
from calibrate.decoder.loading import ComputeDtype
from calibrate.decoder.weights import LayerWeights
from calibrate.journal.activations import (
    ActivationFiles,
    ActivationMemory,
    Activations,
    Embedded,
    Entering,
    require_space,
    temporary,
)
from calibrate.journal.compact_counts import CompactCounts
from calibrate.journal.distributed import Group, require_agreement
from calibrate.journal.identity import arithmetic_of, run_identity
from calibrate.journal.journal import Journal
from calibrate.observe.channel_squares import SumOfSquares
from calibrate.observe.counter import Uncounted
from calibrate.observe.counting_cpu import Counter, make_counter
from calibrate.observe.layer_observer import LayerObserver
from calibrate.observe.observer import check_totals, observations_of
from calibrate.samples.batches import Batch
from octet.artifacts.calibration import BINS, Observation
from octet.model.checkpoint import Checkpoint
from octet.progress import Spread

__all__ = ["Observed", "observe_checkpoint"]

MeanSquares: TypeAlias = dict[str, NDArray[np.float32]]  # float32 [K] by observation

_AT_ONCE = 32  # tensors whose counts the ranks sum at once; a layer with experts has hundreds
_SQUARED_EVERY = 4  # batches: enough for a mean; squaring reads every activation once more
_USUAL_BINS = 4096  # that occur in a tensor: 32 octaves of BF16


@dataclass(frozen=True)
class Observed:
    """The counts of a run.

    `histograms` hold int64 [chunks, 32768], the counts of each chunk of batches, for each of
    `observations`. `facts` of the run are for the manifest. `mean_squares` hold float32 [K], those
    of each channel of the linears' inputs that any token of these batches reached.
    """

    histograms: Mapping[str, NDArray[np.int64]]
    observations: dict[str, Observation]
    facts: dict[str, Any]
    mean_squares: Mapping[str, NDArray[np.float32]]


def observe_checkpoint(
    checkpoint: Checkpoint,
    batches: Sequence[Batch],
    *,
    dtype: ComputeDtype,
    device: torch.device | str = "cpu",
    weights: LayerWeights | None = None,
    chunks: int | None = None,
    queries: bool = False,
    spill: Path | None = None,
    journal: Path | None = None,
    restart: bool = False,
    force: bool = False,
    group: Group | None = None,
    advance: Callable[[int], None] = lambda tokens: None,
) -> Observed:
    """Runs `batches` through the decoder of `checkpoint`, layer by layer, and counts activations.

    Counts are kept apart for each of `chunks` of batches (default: the chunks that the batches
    name). Queries are counted only with `queries`. The mean squares of the linears' inputs are
    computed from every fourth batch. Activations are kept in memory or, with `spill`, in files in a
    new directory below it. Each rank of `group` runs its share of the batches, and returns the sums
    of all. `advance` receives numbers of tokens as work progresses, which add up to those of
    `batches`.

    The directory `journal` keeps the counts of finished layers, from which a killed run continues.
    The caller discards it (`calibrate.journal.journal.discard`) once its own results are written.
    A journal of another run raises ArtifactError, unless `restart` or `force` discards it.

    Raises NumericsError naming tensor, channel and sample of the first NaN or Inf.
    """
    device, group = torch.device(device), group or Group()
    observations = observations_of(checkpoint.spec, getattr(torch, dtype), queries=queries)
    chunks = chunks or 1 + max(batch.chunk for batch in batches)
    with ExitStack() as stack:
        opened: Journal | None = None
        if journal is not None or group.world > 1:
            identity = run_identity(checkpoint, batches, dtype, device, queries=queries)
            require_agreement(group, identity)
            if journal is not None:
                opened = Journal.open(
                    journal, identity, group, spill=spill, restart=restart, force=force
                )
                stack.callback(opened.close)
        names = [
            list(observations_of(checkpoint.spec, getattr(torch, dtype), index, queries=queries))
            for index in range(checkpoint.spec.layers)
        ]
        sweep = _Sweep(
            checkpoint,
            batches,
            names,
            dtype,
            weights or LayerWeights(checkpoint, device, room=0),
            chunks,
            spill,
            opened,
            group,
            advance,
        )
        histograms, squares = sweep.run()
    check_totals(checkpoint.spec, histograms, sum(batch.tokens for batch in batches))
    facts = {
        **arithmetic_of(device),
        "processes": group.world,
        "batches": len(batches),
    }
    return Observed(histograms, observations, facts, squares)


class _Sweep:
    """One pass over the layers, from the first that the journal does not hold."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        batches: Sequence[Batch],
        names: Sequence[list[str]],
        dtype: ComputeDtype,
        weights: LayerWeights,
        chunks: int,
        spill: Path | None,
        journal: Journal | None,
        group: Group,
        advance: Callable[[int], None],
    ) -> None:
        self._checkpoint, self._spec = checkpoint, checkpoint.spec
        self._batches, self._chunks = batches, chunks
        self._own_batches = range(group.rank, len(batches), group.world)
        self._dtype, self._weights, self._device = dtype, weights, weights.device
        self._spill, self._journal, self._group = spill, journal, group
        self._my_tokens = sum(batches[index].tokens for index in self._own_batches)
        tokens = sum(batch.tokens for batch in batches)
        self._finished = 0  # number of layers whose counts the journal holds
        self._progress = Spread(advance, tokens, self._my_tokens * checkpoint.spec.layers)
        self._names = names  # of what is observed, layer by layer

    def run(self) -> tuple[Mapping[str, NDArray[np.int64]], MeanSquares]:
        """Returns the histograms and mean squares of every observed tensor, summed over ranks."""
        histograms, squares = CompactCounts(), dict[str, NDArray[np.float32]]()
        journal, reached = self._journal, 0
        if journal is not None:
            self._finished, reached = journal.finished, journal.reached
            for index in range(self._finished):
                counts, means = journal.counts(index, self._names[index])
                histograms.update(counts)
                squares.update(means)
            self._progress.step(self._finished * self._my_tokens)
            if self._finished == self._spec.layers:
                return histograms, squares
        self._check_space(reached)
        model = LayeredModel(self._checkpoint, self._dtype, self._device, self._weights)
        counter = make_counter(self._device, max(map(len, self._names)))
        with ExitStack() as stack:
            stack.callback(counter.close)
            memory = self._memory(model, stack)
            entering: Entering = Embedded(model, self._batches)
            if journal is not None:
                entering = journal.kept(model, self._batches) or entering
            for index, layer in model.sweep(reached):
                leaving = self._output_of(index, model, memory)
                counted = index >= self._finished
                counts, means = self._count_layer(
                    index, layer, model, counter if counted else Uncounted(), entering, leaving
                )
                if counted:
                    histograms.update(counts)
                    squares.update(means)
                    if journal is not None:
                        journal.commit(index, counts, means)
                if leaving is not None:
                    self._keep(index, model, leaving)
                    entering = leaving
        if journal is not None:
            journal.forget()
        return histograms, squares

    def _memory(self, model: LayeredModel, stack: ExitStack) -> Activations | None:
        """Returns where activations are kept between layers; None if in the journal's files."""
        if self._spill is None:
            return ActivationMemory(self._device, self._weights.resident_bytes)
        if self._journal is not None:
            return None
        name = self._group.attempt(partial(temporary, self._spill, stack))
        return ActivationFiles(name, model, self._batches)

    def _output_of(
        self, index: int, model: LayeredModel, memory: Activations | None
    ) -> Activations | None:
        """Returns where the output of layer `index` is written, or None after the last layer."""
        if index + 1 == self._spec.layers:  # no later layer reads it
            return None
        if memory is None:
            assert self._journal is not None
            return self._journal.begin(index, model, self._batches)
        return memory

    def _keep(self, index: int, model: LayeredModel, leaving: Activations) -> None:
        """Keeps the output of layer `index` in the journal, if it is in files or `due`."""
        journal = self._journal
        if journal is None:
            return
        if isinstance(leaving, ActivationFiles):
            journal.keep(index, leaving)
        elif journal.due():
            files = journal.begin(index, model, self._batches)

            def write() -> None:
                for batch in self._own_batches:
                    files.write(batch, leaving.read(batch))

            self._group.attempt(write)
            journal.keep(index, files)

    def _count_layer(
        self,
        index: int,
        layer: Any,
        model: LayeredModel,
        counter: Counter,
        entering: Entering,
        leaving: Activations | None,
    ) -> tuple[CompactCounts, MeanSquares]:
        """Returns the counts and mean squares of one layer over the batches of all ranks.

        An error of any rank stops all.
        """
        slots = {name: slot for slot, name in enumerate(self._names[index])}
        observer = LayerObserver(self._spec, counter, slots)

        def work() -> tuple[list[CompactCounts], dict[str, SumOfSquares]]:
            with observer.watching(layer, index):
                return self._count_own_batches(model, observer, entering, leaving, list(slots))

        chunks, squares = self._group.attempt(work)
        summed = CompactCounts()
        if isinstance(counter, Uncounted):
            return summed, {}
        for names in _batched(list(slots), _AT_ONCE):
            counts = np.zeros((len(names), self._chunks, BINS), np.int64)
            for chunk, found in enumerate(chunks):
                for row, name in enumerate(names):
                    if name in found:
                        counts[row, chunk] = found[name]
            summed.update(zip(names, self._group.sum(counts), strict=True))
        total: dict[str, SumOfSquares] = {}
        for part in self._group.gather(squares):
            _add(total, part)
        return summed, {name: total[name].mean() for name in slots if name in total}

    def _count_own_batches(
        self,
        model: LayeredModel,
        observer: LayerObserver,
        entering: Entering,
        leaving: Activations | None,
        names: Sequence[str],
    ) -> tuple[list[CompactCounts], dict[str, SumOfSquares]]:
        """Runs one layer over the batches of this rank, and counts its activations.

        Returns the counts by name for each chunk, and the sums of squares by name; both are empty
        if the layer was counted before.
        """
        found = [CompactCounts() for _ in range(self._chunks)]
        squares: dict[str, SumOfSquares] = {}
        counting = not isinstance(observer.counter, Uncounted)
        observer.counter.clear()
        # Empty where there are more processes than batches.
        for index, following in zip_longest(self._own_batches, self._own_batches[1:]):
            batch = self._batches[index]
            compute = partial(model.forward, entering.read(index))
            squared = index % _SQUARED_EVERY == 0
            given = observer.run(batch, compute, squares=squared)
            if leaving is not None:
                leaving.write(index, given)
            last = following is None or self._batches[following].chunk != batch.chunk
            if last:
                observer.check()
            if not counting:
                continue
            if last:
                found[batch.chunk].update(zip(names, observer.counter.counts(), strict=False))
                sums = observer.counter.squares()
                _add(squares, {names[slot]: part for slot, part in sums.items()})
                observer.counter.clear()
            self._progress.step(batch.tokens)
        return found, squares

    def _check_space(self, reached: int) -> None:
        """Raises ArtifactError, on every rank, if rank 0's disk lacks space for the run."""
        self._group.on_first(partial(self._require_space, reached))

    def _require_space(self, reached: int) -> None:
        values = sum(batch.token_ids.numel() for batch in self._batches) * self._spec.hidden_size
        activations = values * getattr(torch, self._dtype).itemsize
        remedy = "name another directory with --spill"
        if self._journal is None:
            if self._spill is not None:
                require_space(self._spill, activations, "one set of activations", remedy)
            return
        # A layer's input and its output; the first layer's input is not stored.
        sets = min(2, self._spec.layers - 1) - (reached > 0)
        require_space(self._journal.place, sets * activations, "keeping activations", remedy)
        tensors = sum(map(len, self._names[self._finished :]))
        counts = tensors * _USUAL_BINS * (2 + 4 * self._chunks)
        where = "write the output elsewhere"
        require_space(self._journal.path, counts, "keeping the counts", where)


def _add(total: dict[str, SumOfSquares], part: Mapping[str, SumOfSquares]) -> None:
    for name, sums in part.items():
        total[name] = total[name] + sums if name in total else sums


def _batched(names: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    for start in range(0, len(names), size):
        yield names[start : start + size]
