"""Calibrating layer by layer: all batches through one decoder layer, then through the next.

    embeddings ─▶ layer 0 ─▶ activations ─▶ layer 1 ─▶ activations ─▶ ...
                     │ counts                  │ counts
                     ▼                         ▼
                histograms, journal       histograms, journal

In memory are the weights of one layer and one set of activations (or, spilled, those of one batch).
The histograms are, bin for bin, those of the whole model in memory: see `calibrate.layers`.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from calibrate.activations import (
    ActivationFiles,
    ActivationMemory,
    Activations,
    Embedded,
    Mirrored,
    require_space,
)
from calibrate.batches import Batch
from calibrate.compact import CompactCounts
from calibrate.counting import Counter, make_counter
from calibrate.distributed import Group, require_agreement
from calibrate.identity import device_name, run_identity
from calibrate.journal import Journal
from calibrate.layers import LayeredModel
from calibrate.loading import ComputeDtype
from calibrate.observe import LayerObserver, check_totals, observations_of
from calibrate.progress import Spread
from octet.calibration import BINS, Observation
from octet.checkpoint import Checkpoint
from octet.errors import OctetError

__all__ = ["Observed", "observe_checkpoint"]


@dataclass(frozen=True)
class Observed:
    """What a run counted: int64 [chunks, 32768], the counts of each chunk of batches, for each of
    `observations`; `facts` of the run are for the manifest."""

    histograms: Mapping[str, NDArray[np.int64]]
    observations: dict[str, Observation]
    facts: dict[str, Any]


def observe_checkpoint(
    checkpoint: Checkpoint,
    batches: Sequence[Batch],
    *,
    dtype: ComputeDtype,
    device: torch.device | str = "cpu",
    chunks: int | None = None,
    spill: Path | None = None,
    journal: Path | None = None,
    restart: bool = False,
    group: Group | None = None,
    threads: int | None = None,
    advance: Callable[[int], None] = lambda tokens: None,
) -> Observed:
    """Runs `batches` through the decoder of `checkpoint`, layer by layer, and counts what flows.

    `chunks` is how many chunks of batches there are (by default those that the batches name).
    Activations wait in memory, or in files in a directory below `spill`, or, with a `journal` too,
    in the journal's. The journal is a directory that holds every finished layer and from which a
    run that was killed continues; the caller removes it when its own work is safe. One of another
    run raises ArtifactError, unless `restart` discards it. Each rank of `group` runs its share of
    the batches, and has the sums of all. `threads` count on a CPU. `advance` is told tokens as work
    is done, which add up to those of `batches`.

    NumericsError names tensor, channel and sample of the first NaN or Inf.
    """
    device, group = torch.device(device), group or Group()
    observations = observations_of(checkpoint.spec, getattr(torch, dtype))
    chunks = chunks or 1 + max(batch.chunk for batch in batches)
    with ExitStack() as stack:
        opened: Journal | None = None
        if journal is not None or group.world > 1:
            identity = run_identity(checkpoint, batches, dtype, device)
            require_agreement(group, identity)
            if journal is not None:
                opened = Journal.open(journal, identity, group, restart=restart)
                stack.callback(opened.close)
        sweep = _Sweep(checkpoint, batches, dtype, device, chunks, spill, opened, group, advance)
        histograms = sweep.run(threads)
    check_totals(checkpoint.spec, histograms, sum(batch.tokens for batch in batches))
    facts = {
        "device": device_name(device),
        "torch_threads": torch.get_num_threads(),
        "processes": group.world,
        "batches": len(batches),
    }
    return Observed(histograms, observations, facts)


class _Sweep:
    """One pass over the layers, from the first that the journal does not hold."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        batches: Sequence[Batch],
        dtype: ComputeDtype,
        device: torch.device,
        chunks: int,
        spill: Path | None,
        journal: Journal | None,
        group: Group,
        advance: Callable[[int], None],
    ) -> None:
        self._checkpoint, self._spec = checkpoint, checkpoint.spec
        self._batches, self._chunks = batches, chunks
        self._mine = range(group.rank, len(batches), group.world)
        self._dtype, self._device = dtype, device
        self._spill, self._journal, self._group = spill, journal, group
        self._my_tokens = sum(batches[index].tokens for index in self._mine)
        tokens = sum(batch.tokens for batch in batches)
        self._progress = Spread(advance, tokens, self._my_tokens * checkpoint.spec.layers)
        self._names = [
            list(observations_of(checkpoint.spec, getattr(torch, dtype), index))
            for index in range(checkpoint.spec.layers)
        ]

    def run(self, threads: int | None) -> Mapping[str, NDArray[np.int64]]:
        """int64 [chunks, 32768] of every observed tensor in order, the sums of all ranks."""
        histograms = CompactCounts()
        first = 0 if self._journal is None else self._journal.finished
        for index in range(first):
            assert self._journal is not None
            names = self._names[index]
            counts = self._journal.histograms(index, names, self._chunks)
            histograms.update(zip(names, counts, strict=True))
            self._progress.step(self._my_tokens)
        if first == self._spec.layers:
            return histograms
        model = LayeredModel(self._checkpoint, self._dtype, self._device)
        self._check_space(first)
        counter = make_counter(self._device, max(map(len, self._names)), threads=threads)
        with ExitStack() as stack:
            stack.callback(counter.close)
            memory = self._memory(model, stack)
            entering: Activations = Embedded(model, self._batches)
            if first:
                assert self._journal is not None
                entering = self._journal.kept(model, self._batches)
            for index, layer in model.sweep(first):
                leaving, files = self._leaving(index, model, memory)
                counts = self._together(index, layer, model, counter, entering, leaving)
                found = dict(zip(self._names[index], counts, strict=True))
                if self._journal is not None:
                    self._journal.commit(index, found, files)
                histograms.update(found)
                entering = leaving or entering
        return histograms

    def _memory(self, model: LayeredModel, stack: ExitStack) -> Activations | None:
        """Where activations wait, None for in the journal's files alone."""
        if self._spill is None:
            return ActivationMemory(self._device)
        if self._journal is not None:
            return None
        self._spill.mkdir(parents=True, exist_ok=True)
        directory = tempfile.TemporaryDirectory(prefix="octet-", dir=self._spill)
        return ActivationFiles(Path(stack.enter_context(directory)), model, self._batches)

    def _leaving(
        self, index: int, model: LayeredModel, memory: Activations | None
    ) -> tuple[Activations | None, ActivationFiles | None]:
        """Where what layer `index` gives goes, and which of it the journal's files are."""
        if index + 1 == self._spec.layers:  # nobody reads it
            return None, None
        if self._journal is None:
            return memory, None
        files = self._journal.begin(index, model, self._batches)
        return (files if memory is None else Mirrored(memory, files)), files

    def _together(
        self,
        index: int,
        layer: Any,
        model: LayeredModel,
        counter: Counter,
        entering: Activations,
        leaving: Activations | None,
    ) -> NDArray[np.int64]:
        """The counts of one layer over the batches of all ranks; an error of any stops all."""
        slots = {name: slot for slot, name in enumerate(self._names[index])}
        observer = LayerObserver(self._spec, counter, slots)
        counts = np.zeros((len(slots), self._chunks, BINS), np.int64)
        error: OctetError | None = None
        try:
            with observer.watching(layer, index):
                self._layer(model, observer, entering, leaving, counts)
        except OctetError as caught:
            error = caught
        self._group.agree(error)
        return self._group.sum(counts)

    def _layer(
        self,
        model: LayeredModel,
        observer: LayerObserver,
        entering: Activations,
        leaving: Activations | None,
        counts: NDArray[np.int64],
    ) -> None:
        """One layer over the batches of this rank, counted into `counts`."""
        observer.counter.clear()
        for index, following in zip(self._mine, [*self._mine[1:], None], strict=True):
            batch = self._batches[index]
            given = observer.run(batch, partial(model.forward, entering.read(index)))
            if leaving is not None:
                leaving.write(index, given)
            if following is None or self._batches[following].chunk != batch.chunk:
                counts[:, batch.chunk] = observer.counter.counts()[: len(counts)]
                observer.counter.clear()
            self._progress.step(batch.tokens)

    def _check_space(self, first: int) -> None:
        """ArtifactError, on every rank, if rank 0's disk cannot hold what will be written."""
        values = sum(batch.token_ids.numel() for batch in self._batches) * self._spec.hidden_size
        activations = values * getattr(torch, self._dtype).itemsize
        error: OctetError | None = None
        try:
            if self._group.rank == 0 and self._journal is not None:
                # What enters a layer and what leaves it; of the first one nothing enters.
                sets = min(2, self._spec.layers - 1) - (first > 0)
                counts = sum(map(len, self._names[first:])) * self._chunks * BINS * 8
                require_space(self._journal.path, sets * activations + counts, "the journal")
            elif self._group.rank == 0 and self._spill is not None:
                self._spill.mkdir(parents=True, exist_ok=True)
                require_space(self._spill, activations, "one set of activations")
        except OctetError as caught:
            error = caught
        self._group.agree(error)
