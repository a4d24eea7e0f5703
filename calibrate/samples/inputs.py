"""Reads what a calibration starts from: the model's samples as batches, and golden prompts."""

from dataclasses import dataclass
from typing import Any

from calibrate.samples.batches import Batch
from calibrate.samples.golden_prompts import READ, choose_prompts, too_short
from calibrate.samples.plan import SamplePlan, plan_batches
from calibrate.samples.source import Sampling
from calibrate.samples.split import CALIBRATION, Split, split_samples
from calibrate.samples.tokens import load_tokenizer, tokenize
from octet.artifacts.provenance import SampleSet
from octet.model.checkpoint import Checkpoint

__all__ = ["Inputs", "read_inputs"]


@dataclass(frozen=True)
class Inputs:
    """Everything that is read before the model runs.

    `prompts` are (text, token ids). `evaluation` are batches of held-out samples, on which
    divergence is measured.
    """

    split: Split
    plan: SamplePlan
    prompts: list[tuple[str, list[int]]]
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
    split = split_samples(file, held_out, sampling.count, allow_few=sampling.allow_few_samples)
    tokenizer = load_tokenizer(checkpoint)
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
    sequences = tokenize(split.held_out, tokenizer, max_length=READ, vocab_size=spec.vocab_size)
    prompts = choose_prompts(sequences, tokenizer, spec.max_positions)
    short = too_short(prompts, spec.max_positions)
    warnings = [*split.warnings, *plan.warnings, *([short] if short else [])]
    if max_length < sampling.max_length:
        warnings.append(
            f"{sampling.max_length} tokens were asked for, the model's context is"
            f" {max_length}: samples were limited to that"
        )
    return Inputs(
        split=split,
        plan=plan,
        prompts=prompts,
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
