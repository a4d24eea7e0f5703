"""Replays a stream of tagged samples over a calibration: see `calibrate.scales.over_time`.

The model runs unquantized, as in the calibration, some steps at a time. Their histograms are folded
into sums before the next ones are read, so memory does not depend on the length of the stream.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from calibrate.decoder.loading import ComputeDtype, resolve_device
from calibrate.decoder.supported import require_runnable
from calibrate.decoder.weights import LayerWeights, full_gpu
from calibrate.observe.histogram import Histogram
from calibrate.observe.sweep import observe_checkpoint
from calibrate.options import ReplayOptions
from calibrate.quality.rule_costs import RuleCosts
from calibrate.report.over_time import DomainCounts, Replay
from calibrate.samples.batches import Batch, make_batches
from calibrate.samples.sample import Sample
from calibrate.samples.stream import Stream, steps_of
from calibrate.samples.tokenizer_check import tokenizer_as_served
from calibrate.samples.tokens import encode, load_tokenizer
from calibrate.scales.derive import scales_in_use
from calibrate.scales.domains import compare
from calibrate.scales.over_time import RULES, Delayed, Rule, TensorOverTime
from calibrate.scales.tensor_scheme import ObservedScheme, scheme_of
from octet.artifacts.calibration import Calibration
from octet.errors import ConfigError
from octet.interrupts import held_back
from octet.model.checkpoint import Checkpoint
from octet.progress import Spread, progress_bar

__all__ = ["replay"]

_TOGETHER = 16  # steps whose histograms are in memory at once
_COMPARED = 64  # samples on which the two tokenizers of a checkpoint are compared


@full_gpu(
    "stop what else uses the GPU, leave out --divergence, which holds the whole model there, give a"
    " smaller --batch-size, or give --device cpu"
)
def replay(
    opened: tuple[Checkpoint, Stream], options: ReplayOptions, *, console: Console | None = None
) -> Replay:
    """Runs the stream through the calibrated model, and returns what each rule of scaling does.

    `opened` is from `calibrate.options.validate_replay`. If the user interrupts it, returns what
    the steps until then have shown; before the first one, raises KeyboardInterrupt. Raises a
    subclass of OctetError for anything that the user can correct; NumericsError names tensor,
    channel and sample of the first NaN or Inf.
    """
    delayed = Delayed(options.history, options.algorithm, options.margin)
    checkpoint, stream = opened
    origin = Calibration.load(options.calibration)
    origin.manifest.model.require(checkpoint)
    checkpoint = origin.applied_to(checkpoint)
    require_runnable(checkpoint)
    static = _static_tensors(origin, delayed)
    tensors = {name: tensor for name, (_, tensor) in static.items()}
    dtype, device = _dtype_of(origin), torch.device(resolve_device(options.device))
    costs = RuleCosts(checkpoint, origin, dtype, device) if options.divergence else None
    runner = _Runner(checkpoint, origin, stream, options, dtype, device)  # in what memory is left
    domains: dict[str, DomainCounts] = {}
    notes: list[str] = []
    total = sum(stream.samples.values())
    try:
        with progress_bar(console, "Replay", total, "samples") as advance:
            for steps in _windows(stream, options.batch_size):
                batches, names = runner.batches(steps), [domain for domain, _ in steps]
                counts = runner.counts(batches, advance)
                with held_back():  # all of a step's figures count, or none
                    scales = _fold(tensors, names, counts)
                    for domain, batch in zip(names, batches, strict=True):
                        before = domains.get(domain, DomainCounts())
                        domains[domain] = before.after(len(batch.lengths), batch.tokens)
                if costs is not None:
                    costs.add(names, batches, scales)
    except KeyboardInterrupt:
        done = sum(domain.samples for domain in domains.values())
        if not done:
            raise
        notes.append(f"interrupted after {done:,} of {total:,} samples: these are their figures")
    compared = {}
    for name, (scheme, tensor) in static.items():
        histograms = {domain: tensor.histogram(domain) for domain in tensor.counts}
        compared[name] = compare(histograms, tensor.format, partial(_scale, scheme))
    return Replay(
        calibration=str(options.calibration),
        recipe=origin.manifest.recipe.name,
        stream=str(options.samples),
        delayed=delayed,
        batch_size=options.batch_size,
        domains=domains,
        tensors=tensors,
        compared=compared,
        kl=costs.found if costs is not None else {},
        notes=(*notes, *runner.notes()),
        interrupted=bool(notes),
    )


def _static_tensors(
    origin: Calibration, delayed: Delayed
) -> dict[str, tuple[ObservedScheme, TensorOverTime]]:
    """Returns each observed tensor that has a static scale from the samples, with its scheme."""
    recipe, found = origin.manifest.recipe, {}
    for name, scale in scales_in_use(origin.observations, origin.scales).items():
        observation = origin.observations[name]
        scheme = scheme_of(recipe, observation)
        if scheme.format is not None and scheme.static and scheme.method != "range":
            tensor = TensorOverTime(scheme.format, observation.code_dtype, scale, delayed)
            found[name] = scheme, tensor
    if not found:
        raise ConfigError(
            f"{origin.path}: recipe {recipe.name} leaves every tensor with a static scale in full"
            " precision; there is nothing to replay"
        )
    return found


def _fold(
    tensors: Mapping[str, TensorOverTime],
    domains: Sequence[str],
    counts: Mapping[str, NDArray[np.int64]],
) -> list[dict[Rule, dict[str, float]]]:
    """Adds the counts [steps, 32768] of each tensor; returns the scales of each step.

    They are by rule and observation.
    """
    scales: list[dict[Rule, dict[str, float]]] = [{rule: {} for rule in RULES} for _ in domains]
    for name, tensor in tensors.items():
        for domain, step, found in zip(domains, counts[name], scales, strict=True):
            for rule, scale in tensor.step(domain, step).items():
                found[rule][name] = scale
    return scales


def _scale(scheme: ObservedScheme, histogram: Histogram) -> float:
    scale = scheme.scale(histogram)
    assert scale is not None  # the scheme is static
    return scale


def _windows(stream: Stream, size: int) -> Iterator[list[tuple[str, list[Sample]]]]:
    steps = steps_of(stream.read(), size)
    while window := list(islice(steps, _TOGETHER)):
        yield window


class _Runner:
    """Makes a batch of each step, and counts the activations of the model on batches."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        origin: Calibration,
        stream: Stream,
        options: ReplayOptions,
        dtype: ComputeDtype,
        device: torch.device,
    ) -> None:
        self._checkpoint, self._stream = checkpoint, stream
        self._dtype, self._device = dtype, device
        self._queries = any(x.kind == "query" for x in origin.observations.values())
        self._weights = LayerWeights(checkpoint, device)
        first = [sample for _, sample in islice(stream.read(), _COMPARED)]
        self._tokenizer, self._warnings = tokenizer_as_served(
            load_tokenizer(checkpoint), checkpoint, first
        )
        self._max_length = min(options.max_length, checkpoint.spec.max_positions)
        self._cut = 0

    def batches(self, steps: Sequence[tuple[str, Sequence[Sample]]]) -> list[Batch]:
        """Returns one batch for each step, with the step's number as its chunk."""
        found = []
        for number, (_, samples) in enumerate(steps):
            vocabulary = self._checkpoint.spec.vocab_size
            rows = list(encode(samples, self._tokenizer, vocab_size=vocabulary))
            self._cut += sum(len(ids) > self._max_length for ids in rows)
            cut = [ids[: self._max_length] for ids in rows]
            origins = [sample.origin for sample in samples]
            found += make_batches(cut, origins, batch_size=len(cut), chunk=number)
        return found

    def counts(
        self, batches: Sequence[Batch], advance: Callable[[int], None]
    ) -> Mapping[str, NDArray[np.int64]]:
        """Returns int64 [steps, 32768] by observation; `advance` gets numbers of samples."""
        samples = sum(len(batch.lengths) for batch in batches)
        tokens = sum(batch.tokens for batch in batches)
        return observe_checkpoint(
            self._checkpoint,
            batches,
            dtype=self._dtype,
            device=self._device,
            weights=self._weights,
            queries=self._queries,
            advance=Spread(advance, samples, tokens).step,
        ).histograms

    def notes(self) -> tuple[str, ...]:
        """Returns what a reader of the result should know, in sentences."""
        notes = list(self._warnings)
        if self._stream.empty:
            notes.append(f"{self._stream.empty} samples without text were left out")
        if self._cut:
            notes.append(f"{self._cut} samples were cut at {self._max_length} tokens")
        if len(self._stream.samples) == 1:
            notes.append("the stream has one domain: there is none to compare it with")
        return tuple(notes)


def _dtype_of(origin: Calibration) -> ComputeDtype:
    """Returns the arithmetic of the calibration."""
    observed = next(iter(origin.observations.values())).observed_dtype
    return "float32" if observed == "float32" else "bfloat16"
