"""`run`: a checkpoint and samples become a calibration."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from calibrate.batches import Batch, make_batches, tokenize
from calibrate.golden import LONGEST, choose_prompts, golden_set
from calibrate.loading import load_model, load_tokenizer, resolve_dtype
from calibrate.observe import Observer, observe
from calibrate.progress import progress_bar
from calibrate.report import build_report, print_report
from calibrate.samples import Sample, load_samples
from calibrate.scales import (
    check_finite,
    check_recipe,
    input_scales,
    kv_scales,
    weight_scales,
)
from calibrate.split import split_samples
from octet.artifact import Manifest, ModelIdentity, SampleSet, check_destination, software
from octet.calibration import Calibration
from octet.checkpoint import Checkpoint
from octet.golden import GoldenSet
from octet.recipe import Recipe

__all__ = ["run"]


def run(
    model: Path,
    samples: Path,
    out: Path,
    *,
    recipe: Recipe,
    name: str | None = None,
    count: int = 256,
    held_out: Path | None = None,
    text_field: str = "text",
    max_length: int = 512,
    batch_size: int = 8,
    dtype: Literal["auto", "bfloat16", "float32"] = "auto",
    allow_few_samples: bool = False,
    force: bool = False,
    console: Console | None = None,
) -> Calibration:
    """Calibrates the checkpoint `model` on the first `count` of `samples`, and writes `out`.

    Golden records come from `held_out`, or from the samples after the first `count`. `name` is
    what the model will be served as (default: its directory's name). `max_length` is in tokens;
    `dtype` is that of the forward pass. Without a console nothing is printed. Raises a subclass of
    OctetError for anything the user can mend; then `out` is as it was.
    """
    check_destination(out, force=force, inputs=[model, samples])
    check_recipe(recipe)
    checkpoint = Checkpoint.open(model)
    held = None if held_out is None else load_samples(held_out, text_field)
    split = split_samples(
        load_samples(samples, text_field), held, count, allow_few=allow_few_samples
    )
    tokenizer = load_tokenizer(checkpoint)
    length = min(max_length, checkpoint.spec.max_positions)
    batches = _batches(split.calibration, tokenizer, checkpoint, length, batch_size)
    prompts = _prompts(split.held_out, tokenizer, checkpoint)
    weights = dict(weight_scales(checkpoint, recipe))
    check_finite(checkpoint, except_for=weights)

    compute_dtype = resolve_dtype(dtype, checkpoint)
    network = load_model(checkpoint, compute_dtype)
    observer, seconds = _observe(network, checkpoint, batches, console)
    golden = _golden(network, checkpoint, prompts, console)

    histograms, observations = observer.histograms, observer.observations
    scales = {f"{name}.weight_scale": weight.scale for name, weight in weights.items()}
    scales |= input_scales(checkpoint, recipe, histograms)
    scales |= kv_scales(checkpoint, recipe, histograms)
    notes = list(split.warnings)
    if length < max_length:
        notes.append(f"samples were cut at the model's context of {length} tokens")

    sample_set = SampleSet(
        sha256=split.sha256,
        count=len(split.calibration),
        tokens=sum(batch.tokens for batch in batches),
        max_length=length,
        batch_size=batch_size,
    )
    identity = ModelIdentity.of(checkpoint, name)
    report = build_report(
        recipe,
        checkpoint.spec,
        observations,
        histograms,
        scales,
        weights,
        model=identity.name,
        samples=sample_set.count,
        tokens=sample_set.tokens,
        warnings=notes,
    )
    manifest = Manifest(
        kind="calibration",
        model=identity,
        recipe=recipe,
        samples=sample_set,
        details={
            "source": str(model.absolute()),
            "compute_dtype": compute_dtype,
            "held_out": split.facts,
            "warnings": list(report.warnings),
        },
        software=software("numpy", "torch", "transformers", "tokenizers", "numba"),
    )
    counts = {name: histogram.counts for name, histogram in histograms.items()}
    extra = {"report.json": json.dumps(report.as_json(), indent=1) + "\n"}
    calibration = Calibration.save(
        out, manifest, observations, counts, scales, golden, extra_files=extra, force=force
    )
    if console is not None:
        print_report(console, report, tokens=sample_set.tokens, seconds=seconds)
    return calibration


def _batches(
    samples: Sequence[Sample], tokenizer: Any, checkpoint: Checkpoint, length: int, size: int
) -> list[Batch]:
    vocab_size = checkpoint.spec.vocab_size
    sequences = tokenize(samples, tokenizer, max_length=length, vocab_size=vocab_size)
    return make_batches(sequences, [sample.origin for sample in samples], batch_size=size)


def _prompts(
    held_out: Sequence[Sample], tokenizer: Any, checkpoint: Checkpoint
) -> list[tuple[str, list[int]]]:
    spec = checkpoint.spec
    sequences = tokenize(held_out, tokenizer, max_length=LONGEST, vocab_size=spec.vocab_size)
    return choose_prompts(sequences, tokenizer, spec.max_positions)


def _observe(
    network: Any, checkpoint: Checkpoint, batches: Sequence[Batch], console: Console | None
) -> tuple[Observer, float]:
    """The observer after every batch, and the seconds that the batches took."""
    tokens = sum(batch.tokens for batch in batches)
    with (
        observe(network, checkpoint.spec) as observer,
        progress_bar(console, "Calibrating", tokens) as advance,
    ):
        started = time.perf_counter()
        for batch in batches:
            observer.run(batch)
            advance(batch.tokens)
        seconds = time.perf_counter() - started
    observer.check(tokens)
    return observer, seconds


def _golden(
    network: Any,
    checkpoint: Checkpoint,
    prompts: Sequence[tuple[str, list[int]]],
    console: Console | None,
) -> GoldenSet:
    """Golden records in float32, whatever dtype `network` calibrated in."""
    reference = network if network.dtype.itemsize == 4 else load_model(checkpoint, "float32")
    tokens = sum(len(ids) for _, ids in prompts)
    with progress_bar(console, "Golden records", tokens) as advance:
        return golden_set(reference, checkpoint, prompts, advance=advance)
