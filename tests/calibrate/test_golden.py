"""Golden records are what the model says, and their prompts can be replayed as text."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from calibrate.golden import CONTINUATION, LONGEST, choose_prompts, golden_set
from calibrate.sample import Sample
from calibrate.tokens import tokenize
from octet.calibration import Calibration
from octet.checkpoint import Checkpoint
from octet.errors import SampleError
from octet.golden import GoldenSet


def test_records_can_be_computed_again_without_a_cache(
    calibration: Calibration, model: Any
) -> None:
    """One forward pass over prompt and continuation, the whole sequence at once."""
    golden = calibration.golden
    assert golden.compute_dtype == "float32"
    assert len(golden.records) == 64
    for item in golden.records[::9]:
        prompt, answer = item.prompt_token_ids, item.continuation_token_ids
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer]), use_cache=False).logits[0]
        logprobs = logits[len(prompt) - 1].double().log_softmax(-1)
        top = logprobs.topk(20)
        np.testing.assert_allclose(item.tops[0].logprobs, top.values.numpy(), atol=1e-4)
        assert item.tops[0].token_ids[0] == answer[0] == int(top.indices[0])
        assert tuple(logits[len(prompt) - 1 : -1].argmax(-1).tolist()) == answer
        assert len(answer) == CONTINUATION


def test_prompts_are_text_that_encodes_to_their_tokens(
    calibration: Calibration, tokenizer: Any
) -> None:
    for item in calibration.golden.records:
        text = json.loads(json.dumps(item.prompt))
        assert tuple(tokenizer(text)["input_ids"]) == item.prompt_token_ids


def test_prompts_have_mixed_lengths(tokenizer: Any) -> None:
    text = "".join(f"def function_{i}(value):\n    return value * {i}\n\n" for i in range(200))
    sequences = [tokenizer(text[i:])["input_ids"] for i in range(5)]
    prompts = choose_prompts(sequences, tokenizer, max_positions=1024)
    lengths = [len(ids) for _, ids in prompts]
    assert len(prompts) == 64
    assert lengths == sorted(lengths)
    assert lengths[0] <= 5
    assert 400 < lengths[-1] <= LONGEST
    assert sum(length > 200 for length in lengths) >= 8
    limited = choose_prompts(sequences, tokenizer, max_positions=64)
    assert max(len(ids) for _, ids in limited) <= 64 - CONTINUATION


def test_a_cut_never_falls_inside_a_character(tokenizer: Any) -> None:
    ids = tokenizer("x = '" + "日本語のテキスト€𝄞" * 40 + "'")["input_ids"]
    for text, prompt in choose_prompts([ids], tokenizer, max_positions=1024):
        assert "�" not in text
        assert tokenizer(text)["input_ids"] == prompt


@pytest.mark.parametrize("adds_bos", [False, True])
def test_prompts_are_cut_from_conversations(adds_bos: bool, example_model: Path) -> None:
    """Their special tokens are spelled out, but for a BOS that the tokenizer adds by itself."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(example_model / "tokenizer.json"),
        bos_token="<|begin|>",
        eos_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template="{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content }}<|im_end|>\n{% endfor %}",
    )
    if adds_bos:
        bos = ("<|begin|>", tokenizer.convert_tokens_to_ids("<|begin|>"))
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|begin|> $A", special_tokens=[bos]
        )
    turns = [{"role": role, "content": "import os\n" * 20} for role in ("user", "assistant")] * 4
    sample = Sample("", "line 1", tuple(turns))
    sequences = tokenize([sample], tokenizer, max_length=LONGEST, vocab_size=len(tokenizer))
    prompts = choose_prompts(sequences, tokenizer, max_positions=1024)
    assert all(tokenizer(text)["input_ids"] == ids for text, ids in prompts)
    assert max(len(ids) for _, ids in prompts) > 100
    assert prompts[-1][0].startswith("<|im_start|>" if adds_bos else "<|begin|><|im_start|>")


def test_nothing_to_cut_prompts_from_is_an_error(tokenizer: Any) -> None:
    inside_a_character = [tokenizer("日")["input_ids"][1:2]]
    if tokenizer.decode(inside_a_character[0]) != "�":
        raise AssertionError("choose another character: this token is a whole one")
    with pytest.raises(SampleError, match="no held-out sample"):
        choose_prompts(inside_a_character, tokenizer, max_positions=1024)


PROMPTS = [("", [7 + n, *range(100, 100 + length)]) for n, length in enumerate(range(0, 60, 5))]


@pytest.fixture(scope="module")
def golden(checkpoint: Checkpoint) -> GoldenSet:
    return golden_set(checkpoint, PROMPTS)


def alone(model: Any, ids: list[int]) -> tuple[list[float], list[int]]:
    """Top log-probabilities after `ids`, and 16 greedy tokens, by the whole model in memory."""
    output = model(torch.tensor([ids]), use_cache=True, logits_to_keep=1)
    logprobs = output.logits[0, -1].double().numpy()
    logprobs = logprobs - logprobs.max()
    logprobs -= np.log(np.exp(logprobs).sum())
    tokens = [int(logprobs.argmax())]
    while len(tokens) < CONTINUATION:
        last = torch.tensor([tokens[-1:]])
        output = model(last, past_key_values=output.past_key_values, use_cache=True)
        tokens.append(int(output.logits[0, -1].argmax()))
    return sorted(logprobs.tolist(), reverse=True)[:20], tokens


def test_layer_by_layer_is_the_whole_model_to_the_bit(golden: GoldenSet, model: Any) -> None:
    for item in golden.records:
        with torch.inference_mode():
            logprobs, tokens = alone(model, list(item.prompt_token_ids))
        assert list(item.tops[0].logprobs) == logprobs
        assert list(item.continuation_token_ids) == tokens


def test_neither_rounds_nor_slices_of_the_head_change_a_record(
    checkpoint: Checkpoint, golden: GoldenSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("calibrate.golden._CACHE_BYTES", 1)
    monkeypatch.setattr("calibrate.golden._KEPT_BYTES", 0)
    assert golden_set(checkpoint, PROMPTS).records == golden.records
    monkeypatch.setattr("calibrate.layers._HEAD_BYTES", 1 << 20)
    sliced = golden_set(checkpoint, PROMPTS)
    for item, other in zip(golden.records, sliced.records, strict=True):
        assert item.continuation_token_ids == other.continuation_token_ids
        np.testing.assert_allclose(item.tops[0].logprobs, other.tops[0].logprobs, atol=1e-5)


def test_progress_adds_up_to_the_prompts(checkpoint: Checkpoint) -> None:
    told: list[int] = []
    golden_set(checkpoint, PROMPTS[:3], advance=told.append)
    assert sum(told) == sum(len(ids) for _, ids in PROMPTS[:3])


def test_an_end_token_ends_the_continuation(checkpoint: Checkpoint, golden: GoldenSet) -> None:
    free = golden.records[0].continuation_token_ids
    spec = checkpoint.spec.model_copy(update={"eos_token_ids": (free[1],)})
    ended = golden_set(replace(checkpoint, spec=spec), PROMPTS[:2]).records[0]
    assert ended.continuation_token_ids == free[: free.index(free[1]) + 1]
