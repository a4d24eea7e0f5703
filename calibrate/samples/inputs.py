"""Reads what a calibration starts from: the model's samples as batches, and golden prompts."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from calibrate.samples.batches import Batch
from calibrate.samples.golden_prompts import READ, Chosen, choose_prompts, too_short
from calibrate.samples.plan import SamplePlan, plan_batches
from calibrate.samples.source import (
    MINIMUM,
    Sample,
    SampleFile,
    Sampling,
    load_samples,
    require_enough,
)
from calibrate.samples.tokenizer_check import tokenizer_as_served
from calibrate.samples.tokens import load_tokenizer, tokenize
from octet.artifacts.golden import Scope
from octet.artifacts.provenance import SampleSet
from octet.model.checkpoint import Checkpoint
from octet.model.spec import ModelSpec

__all__ = [
    "CALIBRATION",
    "Inputs",
    "Prompts",
    "Split",
    "read_inputs",
    "read_prompts",
    "split_samples",
]

CALIBRATION = "calibration samples"  # the source of golden prompts if nothing was held out

_HELD_OUT = 256  # held-out samples that golden prompts are cut from, at most


@dataclass(frozen=True)
class Split:
    """Samples to run and samples to hold out; `facts` about the latter go into the manifest."""

    sha256: str  # of the calibration file
    kind: str  # of the calibration file, such as "JSONL"
    calibration: tuple[Sample, ...]
    held_out: tuple[Sample, ...]
    facts: dict[str, Any]
    warnings: tuple[str, ...] = field(default=())

    @property
    def distinct(self) -> int:
        """Number of calibration samples that differ."""
        return len({sample.key for sample in self.calibration})

    @property
    def shared(self) -> int:
        """Number of held-out samples that are also run."""
        return _shared(self.calibration, self.held_out)


def _shared(calibration: Sequence[Sample], held_out: Sequence[Sample]) -> int:
    seen = {sample.key for sample in calibration}
    return sum(sample.key in seen for sample in held_out)


def split_samples(
    file: SampleFile, held_out: SampleFile | None, count: int, minimum: int = MINIMUM
) -> Split:
    """Takes the first `count` of `file`, and holds out `held_out` or else what follows in `file`.

    No more than that is read. If nothing follows, golden prompts come from the calibration samples,
    with a warning. Raises SampleError for too few samples, and for a sample that cannot be read.
    """
    found, empty = file.first(count + (_HELD_OUT if held_out is None else 0))
    chosen = require_enough(file.path, len(found), count, minimum)
    calibration, rest = found[:chosen], found[chosen:]
    warnings = []
    if chosen < MINIMUM:
        warnings.append(f"{chosen} samples are few: {MINIMUM} to 512 are usual")
    if empty:
        warnings.append(f"{file.path.name}: {empty} samples without text were left out")
    sha256, shared = file.sha256, 0
    if held_out is not None:
        (held, _), source, sha256 = held_out.first(_HELD_OUT), "file", held_out.sha256
        shared = _shared(calibration, held)
        if shared:
            warnings.append(f"{shared} held-out samples are also calibration samples")
    elif rest:
        held, source = rest, "rest of the calibration file"
    else:
        held, source = calibration[:_HELD_OUT], CALIBRATION
        shared = len(held)
        warnings.append(
            "no sample is held out: golden prompts are taken from the calibration samples;"
            " give --held-out or a smaller --count"
        )
    facts = {"source": source, "sha256": sha256, "count": len(held), "also_calibrated": shared}
    return Split(file.sha256, file.kind, calibration, held, facts, tuple(warnings))


@dataclass(frozen=True)
class Inputs:
    """Everything that is read before the model runs.

    `prompts` are (text, token ids). `evaluation` are batches of held-out samples, on which
    divergence is measured.
    """

    split: Split
    plan: SamplePlan
    prompts: list[tuple[str, list[int]]]
    lists: frozenset[int]  # numbers of the prompts that are lists of token ids
    scope: Scope
    evaluation: tuple[Batch, ...]
    sample_set: SampleSet
    warnings: tuple[str, ...]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(ids) for _, ids in self.prompts)

    @property
    def evaluated_on(self) -> str:
        """The source of the tokens in `evaluation`."""
        return CALIBRATION if self.split.facts["source"] == CALIBRATION else "held-out samples"


def read_inputs(checkpoint: Checkpoint, sampling: Sampling) -> Inputs:
    """Reads and tokenizes samples; raises an OctetError that names what cannot be used."""
    file, held_out = sampling.load()
    split = split_samples(file, held_out, sampling.count, sampling.minimum)
    tokenizer, tokens = tokenizer_as_served(
        load_tokenizer(checkpoint), checkpoint, [*split.calibration, *split.held_out]
    )
    spec = checkpoint.spec
    max_length = min(sampling.max_length, spec.max_positions)
    sizes: dict[str, Any] = {
        "max_length": max_length,
        "vocab_size": spec.vocab_size,
        "batch_size": sampling.batch_size,
    }
    plan = plan_batches(
        split.calibration, tokenizer, pack=sampling.pack, long=sampling.long, **sizes
    )
    evaluation = plan_batches(split.held_out, tokenizer, **sizes)
    chosen, scope, short = _chosen(spec, split.held_out, tokenizer)
    distinct, count = split.distinct, len(split.calibration)
    repeated = [f"only {distinct} of {count} samples are distinct"] if 2 * distinct < count else []
    warnings = [*tokens, *split.warnings, *repeated, *plan.warnings, *short]
    if max_length < sampling.max_length:
        warnings.append(
            f"--max-length is {sampling.max_length}, and the model's context {max_length} tokens:"
            " samples were limited to the context"
        )
    return Inputs(
        split=split,
        plan=plan,
        prompts=chosen.prompts,
        lists=chosen.lists,
        scope=scope,
        evaluation=evaluation.batches,
        sample_set=SampleSet(
            sha256=split.sha256,
            count=len(split.calibration),
            tokens=plan.tokens,
            max_length=max_length,
            batch_size=sampling.batch_size,
            facts={"source": split.kind, **plan.facts},
        ),
        warnings=tuple(warnings),
    )


@dataclass(frozen=True)
class Prompts:
    """Golden prompts of a model that is not calibrated.

    `facts` about the samples that they are cut from go into the manifest.
    """

    chosen: Chosen
    scope: Scope
    facts: dict[str, Any]
    warnings: tuple[str, ...]


def read_prompts(
    checkpoint: Checkpoint, path: Path, text_field: str, messages_field: str
) -> Prompts:
    """Cuts golden prompts from the samples at `path`; raises SampleError if that cannot be done."""
    file = load_samples(path, text_field, messages_field)
    samples, _ = file.first(_HELD_OUT)
    tokenizer, warnings = tokenizer_as_served(load_tokenizer(checkpoint), checkpoint, samples)
    chosen, scope, short = _chosen(checkpoint.spec, samples, tokenizer)
    facts = {"source": file.kind, "sha256": file.sha256, "count": len(samples)}
    return Prompts(chosen, scope, facts, (*warnings, *short))


def _chosen(
    spec: ModelSpec, samples: Sequence[Sample], tokenizer: Any
) -> tuple[Chosen, Scope, list[str]]:
    """Returns the golden prompts from held-out samples, what they could cover, and warnings."""
    sequences = tokenize(samples, tokenizer, max_length=READ, vocab_size=spec.vocab_size)
    chosen = choose_prompts(sequences, tokenizer, spec.max_positions, spec.vocab_size)
    short = too_short(chosen.prompts, spec.max_positions)
    found = Counter(token for ids in sequences for token in ids)
    held = sorted({token for _, ids in chosen.prompts for token in ids})
    scope = Scope(
        vocabulary=spec.vocab_size,
        context=spec.max_positions,
        experts=spec.experts * len(spec.sparse_layers),
        held_out=found.total(),
        counts={token: found[token] for token in held if found[token]},
    )
    return chosen, scope, [short] if short else []
