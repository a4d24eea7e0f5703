"""Reads what a calibration starts from: the model's samples as batches, and golden prompts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibrate.samples.batches import Batch
from calibrate.samples.golden_prompts import READ, choose_prompts, too_short
from calibrate.samples.plan import LongPolicy, SamplePlan, plan_batches
from calibrate.samples.source import load_samples
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


def read_inputs(
    checkpoint: Checkpoint,
    samples: Path,
    *,
    held_out: Path | None,
    count: int,
    text_field: str,
    messages_field: str,
    max_length: int,
    long: LongPolicy,
    pack: bool,
    batch_size: int,
    allow_few_samples: bool,
) -> Inputs:
    """Reads and tokenizes `samples`; raises an OctetError that names what cannot be used."""
    held = None if held_out is None else load_samples(held_out, text_field, messages_field)
    split = split_samples(
        load_samples(samples, text_field, messages_field),
        held,
        count,
        allow_few=allow_few_samples,
    )
    tokenizer = load_tokenizer(checkpoint)
    spec = checkpoint.spec
    sizes: dict[str, Any] = {
        "max_length": min(max_length, spec.max_positions),
        "vocab_size": spec.vocab_size,
        "batch_size": batch_size,
    }
    plan = plan_batches(split.calibration, tokenizer, pack=pack, long=long, **sizes)
    evaluation = plan_batches(split.held_out, tokenizer, **sizes)
    sequences = tokenize(split.held_out, tokenizer, max_length=READ, vocab_size=spec.vocab_size)
    prompts = choose_prompts(sequences, tokenizer, spec.max_positions)
    short = too_short(prompts, spec.max_positions)
    warnings = [*split.warnings, *plan.warnings, *([short] if short else [])]
    if sizes["max_length"] < max_length:
        warnings.append(
            f"{max_length} tokens were asked for, the model's context is {spec.max_positions}:"
            f" samples were limited to that"
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
            max_length=sizes["max_length"],
            batch_size=batch_size,
            facts={"source": split.kind, **plan.facts},
        ),
        warnings=tuple(warnings),
    )
