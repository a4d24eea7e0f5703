"""Trains a quantized model to predict what the unquantized one does: distillation.

The student computes as the recipe is served: weights, activations and cache are rounded, and
gradients pass straight through the rounding (`calibrate.decoder.rounding`). It starts from the
weights of a calibration, and stays on the grid of that calibration's scales.

The loss is KL(teacher ‖ student) of the next-token distributions, in nats per token (Hinton et al.,
arXiv 1503.02531). Its gradient by the student's logits is softmax(student) - softmax(teacher), so
logits exist for a few positions at a time, and the teacher runs once: its last hidden states
[tokens, H] are kept.
"""

import json
import math
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, fields
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Adam

from calibrate.algorithms.changed import Changed, in_stored_dtype
from calibrate.algorithms.descent import Descent, order
from calibrate.algorithms.student import Student
from calibrate.decoder.arithmetic import linear
from calibrate.decoder.loading import apply_changes, load_model
from calibrate.decoder.weights import free_memory
from calibrate.job import Job
from calibrate.journal.distributed import Group
from calibrate.journal.identity import digest_of_batches
from calibrate.journal.steps import Steps
from calibrate.options import Training
from calibrate.quality.divergence import Reference, Sums, evaluation_batches
from calibrate.recover_layers import Trained, TrainingRun, train_layers
from calibrate.report.summary import divergence_text
from calibrate.samples.batches import Batch, real
from calibrate.simulate.model import simulate
from calibrate.simulate.scales import Scales
from octet.artifacts.calibration import Calibration
from octet.errors import ArtifactError, ConfigError, GateError
from octet.hardware.devices import devices, find_device
from octet.hardware.support import weight_only
from octet.model.checkpoint import Checkpoint
from octet.progress import progress_bar
from octet.recipe import Recipe
from octet.statistics import interval
from octet.storage.tensors import PendingTensor

__all__ = ["recover"]

_HELD_OUT = 16_384  # held-out tokens that the result is judged on, at least
_KEEP_EVERY_S = 60.0  # how often the state is kept, from which an interrupted run continues
_ELEMENTS = 1 << 22  # logits at a time
_MOMENTS = ("exp_avg", "exp_avg_sq")  # what Adam keeps of each parameter
_STATE = "training"  # name under which the state of the training is kept
_WHOLE, _LAYERS = "whole model", "layer by layer"


def recover(job: Job, training: Training, steps: Steps) -> Changed:
    """Trains what `training` names, and returns the weights on the grid of their scales.

    Trains the whole model if it fits in memory, else one layer after the other. The ranks of the
    job's group share the batches. Raises GateError if the divergence on held-out text is not lower
    afterwards, NumericsError for a loss that is not finite, and ConfigError if memory does not
    suffice.
    """
    origin, group = Calibration.load(training.calibration), job.group
    origin.manifest.model.require(job.checkpoint)
    start = origin.applied_to(job.checkpoint)
    batches = job.inputs.plan.batches
    held_out = evaluation_batches(job.inputs.evaluation, _HELD_OUT)
    job.weights.free()
    shared = [f"{group.world} processes"] if group.world > 1 else []
    exact = job.options.weight_only
    kept = steps.depending_on(training.key, *exact, digest_of_batches(batches), *shared)
    # A continued run may find more memory free, or less.
    method = group.on_first(partial(kept.once, "method", str, partial(_method, job, training)))
    if method == _LAYERS and job.console is not None:
        job.console.print("the whole model does not fit in memory: training layer by layer")
    if job.console is not None:
        job.console.print(_arithmetic(job.options.recipe, exact), highlight=False)
    run = TrainingRun(job, training, start, origin.scales, held_out, kept)
    trained = train_layers(run) if method == _LAYERS else _train_whole(run)
    before, after = (_together(group, sums) for sums in (trained.before, trained.after))
    less = interval(before.kl - after.kl, before.tokens)
    result: dict[str, Any] = {
        "before": _mean(before),
        "after": _mean(after),
        "less": asdict(less),
        "tokens": int(before.tokens.sum()),
        "on": job.inputs.evaluated_on,
    }
    if job.console is not None:
        job.console.print(f"held-out divergence: {divergence_text(result)}", highlight=False)
    group.agree(None if less.low > 0 else _no_better(job, _mean(before), _mean(after)))
    return Changed(
        {name: _pending(start, name) for name in start.changed} | dict(trained.tensors),
        {**origin.weight_scales, **trained.scales},
        {
            **training.settings,
            "weight_only": list(exact),
            "calibration": origin.manifest.identity,
            "method": method,
            "processes": group.world,
            "steps": trained.steps,
            "tokens": training.epochs * job.inputs.plan.tokens,
            "loss": trained.loss,
            "held_out": result,
        },
    )


def _arithmetic(recipe: Recipe, exact: Sequence[str]) -> str:
    """Says which arithmetic is trained for, and for which GPUs that is another one."""
    if exact:
        schemes = " and ".join(exact)
        return f"training for GPUs that run {schemes} weight-only: their inputs are not rounded"
    gpus = {x.capability: x.name for x in reversed(devices()) if x.vendor == "nvidia"}
    others = [
        name for name in reversed(gpus.values()) if weight_only(recipe.pairs, [find_device(name)])
    ]
    hint = f"; give --for if a GPU like these will serve: {', '.join(others)}" if others else ""
    return f"training with rounded activations{hint}"


def _together(group: Group, sums: Sums | None) -> Sums:
    """Returns the sums of all ranks, on every rank."""
    found = [part for part in group.gather(sums) if part is not None]
    names = [field.name for field in fields(Sums)]
    return Sums(*(np.concatenate([getattr(part, name) for part in found]) for name in names))


def _pending(start: Checkpoint, name: str) -> PendingTensor:
    return PendingTensor(
        start.dtype(name), start.shape(name), lambda: np.asarray(start.read(name).codes)
    )


def _no_better(job: Job, before: float, after: float) -> GateError:
    return GateError(
        f"{job.options.out} is not written: the divergence on {job.inputs.evaluated_on} is"
        f" {after:.4g} nats after training, and was {before:.4g}, which 95 % confidence does not"
        " call lower; give a lower --learning-rate, or more samples; the trained weights are kept"
        f" in {job.options.progress}"
    )


def _mean(sums: Sums) -> float:
    return float(sums.kl.sum() / sums.tokens.sum())


def _train_whole(run: TrainingRun) -> Trained:
    """Trains all layers together, on the divergence of next-token distributions."""
    job, spec, recipe = run.job, run.start.spec, run.job.options.recipe
    batches, held_out = run.own_batches()
    model = load_model(job.checkpoint, "float32").to(job.device)
    with progress_bar(job.console, "Teacher", sum(x.tokens for x in batches)) as advance:
        teacher = Reference(model, spec, batches, advance=advance)
    reference = Reference(model, spec, held_out)

    def measured(scales: Scales) -> Sums | None:
        with simulate(model, spec, recipe, scales, job.options.weight_only):
            return reference.tally().sums() if held_out else None

    apply_changes(model, run.start)
    before = job.group.attempt(partial(measured, run.scales))
    student = Student(
        model,
        spec,
        recipe,
        run.scales,
        run.training.train,
        weight_only=job.options.weight_only,
    )
    with closing(student):
        losses = _train(run, student, teacher)
        with torch.no_grad():
            served, moved = student.served(), student.scales()
    tensors = {}
    for name, value in served.items():
        dtype = job.checkpoint.dtype(name)
        tensors[name] = in_stored_dtype(value.detach().cpu().numpy(), dtype)
        with torch.no_grad():
            model.get_parameter(name).copy_(torch.from_numpy(tensors[name].float32()))
    after = job.group.attempt(partial(measured, {**run.scales, **moved}))
    means = _epoch_means(losses, run.steps_per_epoch)
    return Trained(tensors, moved, before, after, means, len(losses))


def _epoch_means(losses: Sequence[float], steps: int) -> list[float]:
    """Returns the mean loss of each epoch of `steps`."""
    epochs = [losses[start : start + steps] for start in range(0, len(losses), steps)]
    return [sum(epoch) / len(epoch) for epoch in epochs]


def _method(job: Job, training: Training) -> str:
    """Returns how to train: the whole model if it fits in memory, else layer by layer.

    Raises ConfigError if neither fits. All is float32. Backpropagation keeps about 12 values of
    each hidden state and 6 of each intermediate one, for every token of a batch and layer.
    """
    checkpoint, spec, group = job.checkpoint, job.checkpoint.spec, job.group
    sizes = {name: math.prod(checkpoint.shape(name)) for name in checkpoint.tensor_names}
    model = sum(sizes.values())
    linears = [
        sum(sizes[f"{linear.name}.weight"] for linear in spec.linears(index))
        for index in range(spec.layers)
    ]
    tokens = max(batch.token_ids.numel() for batch in job.inputs.plan.batches)
    activations = tokens * (12 * spec.hidden_size + 6 * spec.intermediate_size)
    text = math.ceil(job.inputs.plan.tokens / group.world) * spec.hidden_size
    # For each weight: its rounded value; if weights are trained, also a gradient, two moments and a
    # copy; if scales are trained, the derivative by the scale, and a third of that in moments.
    values = 1 + 4 * ("weights" in training.train) + 2 * ("scales" in training.train)
    whole = model + values * sum(linears) + activations * spec.layers + text
    # Layer by layer: the teacher's layer, the student's, and temporaries of one weight at a time.
    layer = (3 + values) * max(linears) + activations
    if job.options.spill is None and job.device.type == "cpu":
        held_out = min(_HELD_OUT, sum(batch.tokens for batch in job.inputs.evaluation))
        layer += 2 * text + 3 * held_out * spec.hidden_size
    free = free_memory(job.device)
    if job.device.type == "cpu":
        free //= group.world
    else:
        layer += 4 * max(linears)  # layers that are read before their turn
    if 4 * whole <= free:
        return _WHOLE
    if 4 * layer <= free:
        return _LAYERS
    ways = "a smaller --batch-size or --max-length"
    if job.options.spill is None and job.device.type == "cpu":
        ways += ", or --spill"
    raise ConfigError(
        f"training takes about {4 * whole / 1e9:.1f} GB of memory, {4 * layer / 1e9:.1f} GB if"
        f" layer by layer, and {free / 1e9:.1f} GB are free for each process:"
        f" {activations * 4 / 1e9:.1f} GB are for the tokens of a batch in a layer; give {ways}"
    )


def _train(run: TrainingRun, student: Student, teacher: Reference) -> list[float]:
    """Trains for all epochs, and returns the loss of each step, in nats per token.

    Continues from the state in `run.kept`, if there is one, to the same bits.
    """
    batches, group, kept = teacher.batches, run.job.group, run.kept
    epochs, steps = run.training.epochs, run.steps_per_epoch
    total = epochs * steps
    losses: list[float] = json.loads(group.on_first(partial(_losses, kept)))
    parameters = list(student.trained.values())
    descent = Descent(parameters, run.training.rate, total, group, done=len(losses))
    if losses:
        group.attempt(partial(_load, student, descent.optimizer, len(losses), kept))
    tokens = epochs * sum(batch.tokens for batch in batches)
    with progress_bar(run.job.console, "Training", tokens) as advance:
        saved = time.monotonic()
        for epoch in range(epochs):
            for place, at in enumerate(order(epoch, len(batches), steps), start=epoch * steps):
                count = 0 if at is None else batches[at].tokens
                if place >= len(losses):
                    losses.append(descent.step(partial(_backward, student, teacher, at), count))
                    due = time.monotonic() - saved > _KEEP_EVERY_S or len(losses) == total
                    if due and group.rank == 0:
                        _keep(student, descent.optimizer, losses, kept)
                        saved = time.monotonic()
                advance(count)
    return losses


def _backward(student: Student, teacher: Reference, at: int | None) -> float:
    assert at is not None
    batch = teacher.batches[at]
    return backward(student.states(batch), batch, teacher.hidden[at], teacher.head)


def backward(states: Tensor, batch: Batch, teacher: Tensor, head: Tensor) -> float:
    """Adds the gradients of the loss to the parameters that `states` [B, T, H] depend on.

    `teacher` [tokens, H] are the unquantized model's last hidden states, `head` [V, H] the output
    embeddings of both. Returns the loss, the mean KL in nats over the batch's tokens.
    """
    rows = real(states, batch)
    gradient = torch.empty_like(rows)
    loss = 0.0
    at_once = max(1, _ELEMENTS // head.shape[0])
    with torch.no_grad():
        for start in range(0, len(rows), at_once):
            part = slice(start, start + at_once)
            p = linear(teacher[part].float(), head).log_softmax(-1)
            q = linear(rows[part], head).log_softmax(-1)
            loss += float((p.exp() * (p - q)).sum(dtype=torch.float64))
            gradient[part] = (q.exp_() - p.exp_()) @ head
    torch.autograd.backward(rows, gradient / len(rows))
    return loss / len(rows)


def _keep(student: Student, optimizer: Adam, losses: Sequence[float], kept: Steps) -> None:
    """Keeps parameters, the optimizer's moments and the losses, to continue from."""
    arrays: dict[str, NDArray[np.float32]] = {}
    for name, parameter in student.trained.items():
        state = optimizer.state[parameter]
        values = {"value": parameter.detach(), **{key: state[key] for key in _MOMENTS}}
        arrays |= {f"{name}.{key}": value.cpu().numpy() for key, value in values.items()}
    kept.keep(_STATE, text=json.dumps(losses), arrays=arrays)


def _losses(kept: Steps) -> str:
    """Returns the losses of the steps before the kept state, as JSON; [] if none is kept."""
    found = kept.load(_STATE)
    return "[]" if found is None else found[0]


def _load(student: Student, optimizer: Adam, done: int, kept: Steps) -> None:
    """Restores the state that `_keep` kept after `done` steps."""
    found = kept.load(_STATE)
    if found is None:
        raise ArtifactError(
            "a process does not find the state of the training that process 0 has kept: name an"
            " --out that all machines share"
        )
    with torch.no_grad():
        for name, parameter in student.trained.items():
            parameter.copy_(torch.tensor(found[1][f"{name}.value"]))
            optimizer.state[parameter] = {
                "step": torch.tensor(float(done)),
                **{
                    key: torch.tensor(found[1][f"{name}.{key}"], device=parameter.device)
                    for key in _MOMENTS
                },
            }
