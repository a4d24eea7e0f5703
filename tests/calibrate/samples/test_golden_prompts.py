"""Golden prompts can be replayed as text and fill a cache if samples allow it."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from calibrate.samples.golden_prompts import CONTINUATION, LONGEST, choose_prompts, too_short
from calibrate.samples.sample import Sample
from calibrate.samples.tokens import tokenize
from octet.errors import SampleError


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


def source(tokenizer: Any, start: int, tokens: int) -> list[int]:
    text = "".join(f"def function_{i}(value):\n    return {i * i}\n\n" for i in range(start, 999))
    ids: list[int] = tokenizer(text)["input_ids"][:tokens]
    assert len(ids) == tokens
    return ids


def test_a_long_sample_fills_the_cache_more_than_once(tokenizer: Any) -> None:
    """Two long samples among short ones give prompts that do not begin alike."""
    sequences = [source(tokenizer, i, 60) for i in range(20)]
    sequences += [source(tokenizer, 30, 3000), source(tokenizer, 60, 2500)]
    prompts = choose_prompts(sequences, tokenizer, 1024)
    filled = [tuple(ids) for _, ids in prompts if len(ids) > 256]
    assert len(filled) >= 8 and len({ids[:16] for ids in filled}) == len(filled)
    assert all(tokenizer(text)["input_ids"] == ids for text, ids in prompts)
    assert too_short(prompts, 1024) is None
    joined = [any(contains(whole, ids) for whole in sequences) for _, ids in prompts]
    assert all(joined)  # none reaches from one sample into the next


def test_short_samples_are_warned_of(tokenizer: Any) -> None:
    prompts = choose_prompts([source(tokenizer, i, 100) for i in range(20)], tokenizer, 1024)
    longest = max(len(ids) for _, ids in prompts)
    warning = too_short(prompts, 1024)
    assert warning is not None and longest <= 100
    assert warning.startswith(
        f"0 of 64 golden prompts have more than 256 tokens, the longest has {longest}"
    )
    # A model whose context is no longer has nothing to be shown there.
    assert too_short(choose_prompts([source(tokenizer, 0, 100)] * 20, tokenizer, 116), 116) is None


def contains(whole: list[int], part: list[int]) -> bool:
    return any(whole[n : n + len(part)] == part for n in range(len(whole)))
