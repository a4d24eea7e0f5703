"""Trains a quantized model one decoder layer at a time, in the memory of one layer.

Each layer, rounded as it is served, reads the output of the trained layers before it. It learns to
reproduce the output of the unquantized layer in the unquantized model, and so also compensates for
errors of earlier layers (Li et al., "BRECQ", arXiv 2102.05426, with layers as blocks).

The loss of a token is |student - teacher|² / |teacher|²: the norm that follows divides by the size
of a hidden state, so this is the error that the next layer sees.

In memory are a layer of the unquantized model and one of the student, what the optimizer keeps of
it, and hidden states, or with `spill` those of one batch.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from calibrate.algorithms.changed import in_stored_dtype
from calibrate.algorithms.descent import Descent, order
from calibrate.algorithms.student import Student
from calibrate.decoder.layers import LayeredModel
from calibrate.decoder.weights import LayerWeights
from calibrate.job import Job
from calibrate.journal.activations import (
    ActivationFiles,
    ActivationMemory,
    Activations,
    Embedded,
    Entering,
    temporary,
)
from calibrate.journal.steps import Steps
from calibrate.options import Training
from calibrate.quality.divergence import Sums, Tally
from calibrate.samples.batches import Batch, real
from calibrate.simulate.scales import Scales
from octet.errors import ArtifactError
from octet.model.checkpoint import Checkpoint
from octet.progress import progress_bar
from octet.storage.tensors import PendingTensor
from octet.storage.tensors import Tensor as StoredTensor

__all__ = ["Trained", "TrainingRun", "backward", "train_layers"]

_LOGITS = 1 << 25  # logits at a time
_LEAST = 1e-12  # of the mean square of a hidden state, by which the loss divides


@dataclass(frozen=True)
class TrainingRun:
    """Holds what a training starts from; the ranks of the job's group share its batches.

    `start` is the checkpoint with the weights of the calibration, and `scales` are the
    calibration's. `kept` holds finished work, from which a killed run continues.
    """

    job: Job
    training: Training
    start: Checkpoint
    scales: Scales
    held_out: Sequence[Batch]
    kept: Steps

    @property
    def steps_per_epoch(self) -> int:
        """The steps that the rank with the most batches takes."""
        return math.ceil(len(self.job.inputs.plan.batches) / self.job.group.world)

    def own_batches(self) -> tuple[Sequence[Batch], Sequence[Batch]]:
        """Returns this rank's share of the batches to train on, and of the held-out ones."""
        rank, world = self.job.group.rank, self.job.group.world
        return self.job.inputs.plan.batches[rank::world], self.held_out[rank::world]


@dataclass(frozen=True)
class Trained:
    """Trained tensors as they are stored, by name, and how often the optimizer took a step.

    `scales` are the weight scales that were trained, by their names in a calibration. `before` and
    `after` compare the student with the unquantized model on this rank's held-out text; None if it
    has none. `loss` is the mean of each epoch or, layer by layer, a list of these for each layer.
    """

    tensors: Mapping[str, StoredTensor | PendingTensor]
    scales: Scales
    before: Sums | None
    after: Sums | None
    loss: list[Any]
    steps: int


def train_layers(run: TrainingRun) -> Trained:
    """Trains one layer after the other, and keeps each in `run.kept`.

    Raises NumericsError if a loss is not finite.
    """
    with ExitStack() as stack:
        return _LayerTrainer(run, stack).train()


class _Hidden:
    """Hidden states of this rank's `batches` before a layer; `advance` runs them through it."""

    def __init__(self, batches: Sequence[Batch], entering: Entering, kept: Activations) -> None:
        self.batches, self._entering, self._kept = batches, entering, kept

    def read(self, index: int) -> Tensor:
        hidden = self._entering.read(index)
        return hidden.clone() if hidden.is_inference() else hidden  # gradients need it

    def advance(self, forward: Callable[[Tensor], Tensor]) -> None:
        for index in range(len(self.batches)):
            self._kept.write(index, forward(self.read(index)))
        self._entering = self._kept


class _LayerTrainer:
    """Trains all layers in one pass over them; `stack` closes files of hidden states."""

    def __init__(self, run: TrainingRun, stack: ExitStack) -> None:
        job, start = run.job, run.start
        self._run, self._job, self._training, self._start = run, job, run.training, start
        self._group, self._spec = job.group, start.spec
        self._teacher, self._student = (
            LayeredModel(x, "float32", job.device, LayerWeights(x, job.device, room=0))
            for x in (job.checkpoint, start)
        )
        batches, held_out = run.own_batches()

        def hidden(model: LayeredModel, batches: Sequence[Batch]) -> _Hidden:
            entering = Embedded(model, batches)
            if job.options.spill is None:
                return _Hidden(batches, entering, ActivationMemory(job.device))
            directory = self._group.attempt(partial(temporary, job.options.spill, stack))
            return _Hidden(batches, entering, ActivationFiles(directory, model, batches))

        self._target, self._input = hidden(self._teacher, batches), hidden(self._student, batches)
        self._reference = hidden(self._teacher, held_out)
        self._opened: tuple[int, dict[str, NDArray[Any]]] | None = None
        self._before, self._after = (hidden(self._student, held_out) for _ in range(2))

    def train(self) -> Trained:
        tensors: dict[str, StoredTensor | PendingTensor] = {}
        scales: dict[str, NDArray[np.float32]] = {}
        losses: list[list[float]] = []
        passes = self._training.epochs + 1
        total = self._spec.layers * passes * sum(batch.tokens for batch in self._input.batches)
        with progress_bar(self._job.console, "Training layers", total) as advance:
            sweeps = (self._teacher.sweep(), self._student.sweep())
            for (index, _), (_, layer) in zip(*sweeps, strict=True):
                layer.float()  # a GPU holds it as it is stored
                found, shapes, moved = self._layer(index, advance)
                losses.append(found)
                scales |= moved
                for name, shape in shapes.items():
                    read = partial(self._codes, index, name)
                    tensors[name] = PendingTensor(self._start.dtype(name), shape, read)
        before, after = self._group.attempt(
            lambda: (self._sums(self._before), self._sums(self._after))
        )
        steps = self._spec.layers * self._training.epochs * self._run.steps_per_epoch
        return Trained(tensors, scales, before, after, losses, steps)

    def _layer(
        self, index: int, advance: Callable[[int], None]
    ) -> tuple[list[float], dict[str, tuple[int, ...]], dict[str, NDArray[np.float32]]]:
        """Trains a layer if the journal does not hold it, and moves all hidden states behind it.

        Returns the mean loss of each epoch, the shapes of its trained tensors, and its trained
        scales, both by name.
        """
        tokens = sum(batch.tokens for batch in self._input.batches)
        self._advance(partial(self._teacher.forward, cache=None), self._target, self._reference)
        student = Student(
            self._student.module,
            self._spec,
            self._job.options.recipe,
            self._run.scales,
            self._training.train,
            layers=range(index, index + 1),
            weight_only=self._job.options.weight_only,
        )
        with closing(student):
            self._advance(self._student_forward(student.served), self._before)
            text = self._group.on_first(partial(self._finished, index))
            if text is None:
                losses = self._train(student, index, advance)
                with torch.no_grad():
                    served = student.served()
                scales = student.scales()
                stored = {name: self._as_stored(name, x) for name, x in served.items()}
                arrays = scales | {name: x.codes for name, x in stored.items()}
                text = json.dumps(losses)
                self._group.on_first(
                    partial(self._run.kept.keep, _name(index), text=text, arrays=arrays)
                )
            else:
                losses = json.loads(text)
                arrays = self._group.attempt(partial(self._load, index))
                scales = {name: np.array(arrays[name]) for name in student.scales()}
                stored = {
                    name: StoredTensor(self._start.dtype(name), codes)
                    for name, codes in arrays.items()
                    if name not in scales
                }
                advance(self._training.epochs * tokens)
            values = {
                name: torch.from_numpy(x.float32()).to(self._job.device)
                for name, x in stored.items()
            }
            last = index + 1 == self._spec.layers
            following = [self._after] if last else [self._after, self._input]
            self._advance(self._student_forward(lambda: values), *following)
        advance(tokens)
        return losses, {name: x.shape for name, x in stored.items()}, scales

    def _train(self, student: Student, index: int, advance: Callable[[int], None]) -> list[float]:
        batches, epochs = self._input.batches, self._training.epochs
        descent = Descent(
            list(student.trained.values()),
            self._training.rate,
            epochs * self._run.steps_per_epoch,
            self._group,
            where=f" of layer {index}",
        )
        losses = []
        for epoch in range(epochs):
            found = []
            for at in order(epoch, len(batches), self._run.steps_per_epoch):
                tokens = 0 if at is None else batches[at].tokens
                found.append(descent.step(partial(self._backward, student, at), tokens))
                advance(tokens)
            losses.append(sum(found) / len(found))
        return losses

    def _backward(self, student: Student, at: int | None) -> float:
        assert at is not None
        batch = self._input.batches[at]
        states = self._student.differentiable(self._input.read(at), student.served())
        return backward(real(states, batch), real(self._target.read(at), batch))

    def _advance(self, forward: Callable[[Tensor], Tensor], *all_hidden: _Hidden) -> None:
        """Runs hidden states through the layer; an error of any rank stops all."""

        def work() -> None:
            for hidden in all_hidden:
                hidden.advance(forward)

        self._group.attempt(work)

    def _student_forward(
        self, served: Callable[[], Mapping[str, Tensor]]
    ) -> Callable[[Tensor], Tensor]:
        """Returns the forward pass of the student's layer with the parameters `served`."""
        with torch.no_grad():
            parameters = served()

        @torch.no_grad()
        def forward(hidden: Tensor) -> Tensor:
            return self._student.differentiable(hidden, parameters)

        return forward

    def _as_stored(self, name: str, value: Tensor) -> StoredTensor:
        return in_stored_dtype(value.detach().cpu().numpy(), self._start.dtype(name))

    def _finished(self, index: int) -> str | None:
        """Returns the losses of a layer that an earlier run trained, as JSON."""
        found = self._run.kept.load(_name(index))
        return None if found is None else found[0]

    def _load(self, index: int) -> dict[str, NDArray[Any]]:
        """Returns the codes of a finished layer's tensors; holds those of one layer at a time."""
        if self._opened is None or self._opened[0] != index:
            found = self._run.kept.load(_name(index))
            if found is None:
                raise ArtifactError(
                    f"{self._job.options.progress}: process {self._group.rank} does not find layer"
                    f" {index} that process 0 has kept: name an --out that all machines share"
                )
            self._opened = index, found[1]
        return self._opened[1]

    def _codes(self, index: int, name: str) -> NDArray[Any]:
        return self._load(index)[name]

    @torch.no_grad()
    def _sums(self, student: _Hidden) -> Sums | None:
        """Compares the logits of the `student` and the unquantized model on held-out text."""
        tally, at_once = Tally(), max(1, _LOGITS // self._spec.vocab_size)
        for index, batch in enumerate(student.batches):
            both = [real(x.read(index), batch) for x in (self._reference, student)]
            parts = zip(*(torch.split(x, at_once) for x in both), strict=True)
            tally.add(batch, (self._logits(*pair) for pair in parts))
        return tally.sums() if student.batches else None

    def _logits(self, teacher: Tensor, student: Tensor) -> tuple[Tensor, Tensor]:
        ((before,), (now,)) = (
            self._teacher.logits([teacher[None]])[0],
            self._student.logits([student[None]])[0],
        )
        return before, now


def backward(states: Tensor, teacher: Tensor) -> float:
    """Adds the gradients of the loss to the parameters that `states` [tokens, H] depend on.

    Returns the loss, the mean over tokens of |states - teacher|² / |teacher|².
    """
    with torch.no_grad():
        error = states - teacher
        size = teacher.square().mean(-1, keepdim=True).clamp_(min=_LEAST)
        weighted = error / (size * error.numel())
        loss = float((error * weighted).sum(dtype=torch.float64))
        gradient = weighted.mul_(2)
    torch.autograd.backward(states, gradient)
    return loss


def _name(index: int) -> str:
    """Returns the name under which a trained layer is kept."""
    return f"layer-{index}"
