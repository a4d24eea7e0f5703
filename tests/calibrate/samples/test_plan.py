"""The batches of a run, and what is said about how they were made."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from calibrate.observe.sweep import observe_checkpoint
from calibrate.samples.plan import LongPolicy, SamplePlan, plan_batches
from calibrate.samples.sample import Sample
from octet.errors import ConfigError, SampleError
from octet.model.checkpoint import Checkpoint

CONVERSATION = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"})


def samples_of(count: int) -> list[Sample]:
    return [
        Sample(f"def f{n}(x):\n    return x + {n}\n" * (1 + n % 7), f"line {n + 1}")
        for n in range(count)
    ]


def plan_of(
    samples: list[Sample],
    tokenizer: Any,
    *,
    max_length: int = 512,
    pack: bool = False,
    long: LongPolicy = "cut",
) -> SamplePlan:
    return plan_batches(
        samples,
        tokenizer,
        max_length=max_length,
        vocab_size=4096,
        batch_size=8,
        pack=pack,
        long=long,
    )


def test_each_chunk_holds_its_samples_and_no_batch_crosses(tokenizer: Any) -> None:
    plan = plan_of(samples_of(100), tokenizer)
    assert plan.chunk_ends == (32, 64, 100)
    assert [batch.chunk for batch in plan.batches] == [0] * 4 + [1] * 4 + [2] * 5
    start = 0
    for chunk, end in enumerate(plan.chunk_ends):
        batches = [batch for batch in plan.batches if batch.chunk == chunk]
        origins = {origin for batch in batches for origin in batch.origins}
        assert origins == {f"line {n + 1}" for n in range(start, end)}
        lengths = [length for batch in batches for length in batch.lengths]
        assert lengths == sorted(lengths, reverse=True)
        start = end


def test_batches_depend_on_lengths_and_order_alone(tokenizer: Any) -> None:
    one = plan_of(samples_of(40), tokenizer, pack=True)
    other = [Sample(s.text.replace("return", "import"), s.origin) for s in samples_of(40)]
    two = plan_of(other, tokenizer, pack=True)
    assert [b.origins for b in one.batches] == [b.origins for b in two.batches]
    assert one.facts == two.facts
    assert not torch.equal(one.batches[0].token_ids, two.batches[0].token_ids)


def test_facts_are_counts_of_the_batches(tokenizer: Any) -> None:
    samples = samples_of(40)
    lengths = [len(tokenizer(sample.text)["input_ids"]) for sample in samples]
    plan = plan_of(samples, tokenizer, max_length=30)
    over = [length for length in lengths if length > 30]
    assert 0 < len(over) < 40
    assert plan.tokens == sum(min(length, 30) for length in lengths)
    assert plan.facts["over_long"] == len(over)
    assert plan.facts["tokens_cut"] == sum(over) - 30 * len(over)
    assert plan.facts["conversations"] == 0
    assert plan.facts["chat_template"] is None
    shapes = [[*shape] for *shape, times in plan.facts["batch_shapes"] for _ in range(times)]
    assert shapes == [list(batch.token_ids.shape) for batch in plan.batches]
    slots = sum(rows * length for rows, length in shapes)
    assert plan.facts["padding_share"] == pytest.approx(1 - plan.tokens / slots, abs=1e-6)
    assert json.loads(json.dumps(plan.facts)) == plan.facts
    assert f"{len(over)} longer than 30 tokens cut" in plan.summary()
    assert plan.warnings == ()


def test_splitting_keeps_every_token(tokenizer: Any) -> None:
    samples = samples_of(40)
    whole = plan_of(samples, tokenizer)
    split = plan_of(samples, tokenizer, max_length=30, long="split")
    assert whole.facts["over_long"] == 0
    assert split.tokens == whole.tokens
    assert split.facts["tokens_cut"] == 0
    assert split.facts["rows"] > 40
    assert "split into rows" in split.summary()
    with pytest.raises(SampleError, match=r"line \d+ is \d+ tokens long, 30 are allowed"):
        plan_of(samples, tokenizer, max_length=30, long="refuse")


def test_packing_joins_samples_by_the_end_token(tokenizer: Any) -> None:
    samples = samples_of(40)
    whole = plan_of(samples, tokenizer, max_length=256)
    packed = plan_of(samples, tokenizer, max_length=256, pack=True)
    joins = 40 - packed.facts["rows"]
    assert packed.facts["tokens_joining"] == joins > 0
    assert packed.tokens == whole.tokens + joins
    ends = sum(int((batch.token_ids == tokenizer.eos_token_id).sum()) for batch in packed.batches)
    padding = sum(batch.token_ids.numel() - batch.tokens for batch in packed.batches)
    assert ends == joins + padding  # this tokenizer's end token is 0, which pads too
    assert "packed into" in packed.summary()


@pytest.mark.parametrize("pack", [False, True])
def test_padding_is_never_observed(pack: bool, checkpoint: Checkpoint, tokenizer: Any) -> None:
    plan = plan_of(samples_of(12), tokenizer, max_length=200, pack=pack)
    assert plan.facts["padding_share"] > 0
    observed = observe_checkpoint(checkpoint, plan.batches, dtype="float32")
    counts = observed.histograms[next(checkpoint.spec.linears()).input]
    assert counts.sum() == plan.tokens * checkpoint.spec.hidden_size


def test_packing_needs_an_end_token(example_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(example_model)
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match=r"--pack .* it has none"):
        plan_of(samples_of(2), tokenizer, pack=True)


def test_the_template_in_use_is_said(example_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(example_model)
    samples = [*samples_of(3), Sample("", "line 4", CONVERSATION)]
    plan = plan_of(samples, tokenizer)
    assert plan.facts["conversations"] == 1
    assert plan.facts["chat_template"] == "plain default"
    assert any("brings no chat template" in warning for warning in plan.warnings)
    tokenizer.chat_template = "{{ messages[0].content }}"
    plan = plan_of(samples, tokenizer)
    assert (plan.facts["chat_template"], plan.warnings) == ("the tokenizer's", ())
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}: {{ messages[0].content }}"
    assert any("today's date" in warning for warning in plan_of(samples, tokenizer).warnings)
