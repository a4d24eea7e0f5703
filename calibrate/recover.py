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
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Adam
from torch.optim.lr_scheduler import LambdaLR

from calibrate.algorithms.changed import Changed, in_stored_dtype
from calibrate.algorithms.student import Student
from calibrate.decoder.arithmetic import linear
from calibrate.decoder.loading import apply_changes, load_model
from calibrate.decoder.weights import free_memory
from calibrate.job import Job
from calibrate.journal.identity import digest_of_batches
from calibrate.journal.steps import Steps
from calibrate.options import Training
from calibrate.quality.divergence import Reference, Sums, evaluation_batches
from calibrate.report.summary import divergence_text
from calibrate.samples.batches import Batch, real
from calibrate.simulate.model import simulate
from octet.artifacts.calibration import Calibration
from octet.errors import ConfigError, GateError, NumericsError
from octet.progress import progress_bar
from octet.statistics import interval

__all__ = ["recover"]

_HELD_OUT = 16_384  # tokens that the result is judged on, at least
_KEPT_S = 60.0  # between two states of the training that an interrupted run continues from
_ELEMENTS = 1 << 22  # logits at a time
_MOMENTS = ("exp_avg", "exp_avg_sq")  # what Adam keeps of each parameter
_STEP = "training"  # the name of that state
_WARM_UP = 0.1  # share of the steps in which the learning rate rises
_BETAS = (0.9, 0.95)  # of Adam: a short training has no use for a long memory
_LARGEST_GRADIENT = 1.0  # its norm over all parameters, above which it is scaled down


def recover(job: Job, training: Training, steps: Steps) -> Changed:
    """Trains the weights of `training.calibration`, and returns them on the grid of its scales.

    Raises GateError if the divergence on held-out text is not lower afterwards, NumericsError for a
    loss that is not finite, and ConfigError if memory does not suffice.
    """
    origin = Calibration.load(training.calibration)
    origin.manifest.model.require(job.checkpoint)
    start, spec, recipe = origin.applied_to(job.checkpoint), job.checkpoint.spec, job.options.recipe
    batches = job.inputs.plan.batches
    job.weights.free()
    _check_memory(job, training)
    model = load_model(job.checkpoint, "float32").to(job.device)
    with progress_bar(job.console, "Teacher", job.inputs.plan.tokens) as advance:
        teacher = Reference(model, spec, batches, advance=advance)
    held_out = Reference(model, spec, evaluation_batches(job.inputs.evaluation, _HELD_OUT))

    def measured() -> Sums:
        with simulate(model, spec, recipe, origin.scales):
            return held_out.tally().sums()

    apply_changes(model, start)
    before = measured()
    with closing(Student(model, spec, recipe, origin.scales, training.train)) as student:
        kept = steps.depending_on(training.key, digest_of_batches(batches))
        losses = _train(student, teacher, training, kept, job.console)
        with torch.no_grad():
            served = student.served()
    tensors = {name: start.read(name) for name in start.changed}
    for name, value in served.items():
        dtype = job.checkpoint.dtype(name)
        tensors[name] = in_stored_dtype(value.detach().cpu().numpy(), dtype)
        with torch.no_grad():
            model.get_parameter(name).copy_(torch.from_numpy(tensors[name].float32()))
    after = measured()
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
    if not less.low > 0:
        raise GateError(
            f"{job.options.out} is not written: the divergence on {job.inputs.evaluated_on} is"
            f" {_mean(after):.4g} nats after training, and was {_mean(before):.4g}, which 95 %"
            " confidence does not call lower; give a lower --learning-rate, or more samples; the"
            f" trained weights are kept in {job.options.progress}"
        )
    suffixes = (".weight_scale", ".weight_global_scale")
    return Changed(
        tensors,
        {name: scale for name, scale in origin.scales.items() if name.endswith(suffixes)},
        {
            **training.settings,
            "calibration": origin.manifest.identity,
            "steps": len(losses),
            "tokens": training.epochs * job.inputs.plan.tokens,
            "loss": _by_epoch(losses, len(batches)),
            "held_out": result,
        },
    )


def _mean(sums: Sums) -> float:
    return float(sums.kl.sum() / sums.tokens.sum())


def _by_epoch(losses: Sequence[float], batches: int) -> list[float]:
    epochs = [losses[start : start + batches] for start in range(0, len(losses), batches)]
    return [sum(epoch) / len(epoch) for epoch in epochs]


def _check_memory(job: Job, training: Training) -> None:
    """Raises ConfigError if the model, its gradients and what the optimizer keeps do not fit.

    All is float32. Backpropagation keeps about 12 values of each hidden state and 6 of each
    intermediate one, for every token of a batch and layer.
    """
    checkpoint, spec = job.checkpoint, job.checkpoint.spec
    sizes = {name: math.prod(checkpoint.shape(name)) for name in checkpoint.tensor_names}
    model, linears = sum(sizes.values()), sum(sizes[f"{x.name}.weight"] for x in spec.linears())
    tokens = max(batch.token_ids.numel() for batch in job.inputs.plan.batches)
    activations = tokens * spec.layers * (12 * spec.hidden_size + 6 * spec.intermediate_size)
    teacher = job.inputs.plan.tokens * spec.hidden_size
    rest = model + linears + activations + teacher
    trained = 4 * linears if "weights" in training.train else 0
    needed, free = 4 * (rest + trained), free_memory(job.device)
    if needed <= free:
        return
    ways = ["a smaller --batch-size or --max-length"]
    if trained and 4 * rest <= free:
        ways.append("--train norms")
    raise ConfigError(
        f"training takes about {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free:"
        f" {activations * 4 / 1e9:.1f} GB are for the tokens of a batch, {4 * model / 1e9:.1f} GB"
        f" for the model; give {' or '.join(ways)}"
    )


def _train(
    student: Student, teacher: Reference, training: Training, kept: Steps, console: Console | None
) -> list[float]:
    """Trains for all epochs, and returns the loss of each step, in nats per token.

    Continues from the state in `kept`, if there is one, to the same bits.
    """
    batches, parameters = teacher.batches, list(student.trained.values())
    total = training.epochs * len(batches)
    rise = max(1.0, _WARM_UP * total)

    def share(step: int) -> float:
        return min((step + 1) / rise, 0.5 + 0.5 * math.cos(math.pi * step / total))

    rate = training.learning_rate
    optimizer = Adam([{"params": parameters, "initial_lr": rate}], lr=rate, betas=_BETAS)
    losses = _load(student, optimizer, kept)
    schedule = LambdaLR(optimizer, share, last_epoch=len(losses) - 1)
    order: list[int] = []
    tokens = sum(batch.tokens for batch in batches)
    with progress_bar(console, "Training", training.epochs * tokens) as advance:
        saved = time.monotonic()
        for step in range(total):
            epoch, at = divmod(step, len(batches))
            if not at:
                order = torch.randperm(len(batches), generator=_seeded(epoch)).tolist()
            batch = batches[order[at]]
            if step >= len(losses):
                optimizer.zero_grad()
                hidden = teacher.hidden[order[at]]
                loss = backward(student.states(batch), batch, hidden, teacher.head)
                if not math.isfinite(loss):
                    raise NumericsError(
                        f"the loss is not finite after {step} steps of training: give a lower"
                        f" --learning-rate than {rate:g}"
                    )
                losses.append(loss)
                clip_grad_norm_(parameters, _LARGEST_GRADIENT)
                optimizer.step()
                schedule.step()
                if time.monotonic() - saved > _KEPT_S or len(losses) == total:
                    _keep(student, optimizer, losses, kept)
                    saved = time.monotonic()
            advance(batch.tokens)
    return losses


def _seeded(epoch: int) -> torch.Generator:
    return torch.Generator().manual_seed(epoch)


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
    arrays: dict[str, NDArray[np.float32]] = {}
    for name, parameter in student.trained.items():
        state = optimizer.state[parameter]
        values = {"value": parameter.detach(), **{key: state[key] for key in _MOMENTS}}
        arrays |= {f"{name}.{key}": value.cpu().numpy() for key, value in values.items()}
    kept.keep(_STEP, text=json.dumps(losses), arrays=arrays)


def _load(student: Student, optimizer: Adam, kept: Steps) -> list[float]:
    """Restores the state that `_keep` kept, and returns the losses until then; [] if none was."""
    found = kept.load(_STEP)
    if found is None:
        return []
    losses: list[float] = json.loads(found[0])
    with torch.no_grad():
        for name, parameter in student.trained.items():
            parameter.copy_(torch.tensor(found[1][f"{name}.value"]))
            optimizer.state[parameter] = {
                "step": torch.tensor(float(len(losses))),
                **{
                    key: torch.tensor(found[1][f"{name}.{key}"], device=parameter.device)
                    for key in _MOMENTS
                },
            }
    return losses
