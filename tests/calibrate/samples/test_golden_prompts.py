"""Golden prompts can be replayed as text and fill a cache if samples allow it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from calibrate.samples.golden_prompts import CONTINUATION, LONGEST, choose_prompts, too_short
from calibrate.samples.sample import Sample
from calibrate.samples.tokens import tokenize
from calibrate.samples.vocabulary import Unlisted
from octet.artifacts.golden import FIRST, POSITIONS, spread
from octet.errors import SampleError


def chosen(
    sequences: Sequence[Sequence[int]], tokenizer: Any, max_positions: int
) -> list[tuple[str, list[int]]]:
    return choose_prompts(sequences, tokenizer, max_positions, len(tokenizer)).prompts


def test_prompts_have_mixed_lengths(tokenizer: Any) -> None:
    text = "".join(f"def function_{i}(value):\n    return value * {i}\n\n" for i in range(200))
    sequences = [tokenizer(text[i:])["input_ids"] for i in range(5)]
    prompts = chosen(sequences, tokenizer, 1024)
    lengths = [len(ids) for _, ids in prompts]
    assert len(prompts) == 64
    assert lengths == sorted(lengths)
    assert lengths[0] <= 5
    assert 400 < lengths[-1] <= LONGEST
    assert sum(length > 200 for length in lengths) >= 8
    limited = chosen(sequences, tokenizer, 64)
    assert max(len(ids) for _, ids in limited) <= 64 - CONTINUATION


def test_a_cut_never_falls_inside_a_character(tokenizer: Any) -> None:
    ids = tokenizer("x = '" + "日本語のテキスト€𝄞" * 40 + "'")["input_ids"]
    for text, prompt in chosen([ids], tokenizer, 1024):
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
    prompts = chosen(sequences, tokenizer, 1024)
    assert all(tokenizer(text)["input_ids"] == ids for text, ids in prompts)
    assert max(len(ids) for _, ids in prompts) > 100
    assert prompts[-1][0].startswith("<|im_start|>" if adds_bos else "<|begin|><|im_start|>")


def test_nothing_to_cut_prompts_from_is_an_error(tokenizer: Any) -> None:
    inside_a_character = [tokenizer("日")["input_ids"][1:2]]
    if tokenizer.decode(inside_a_character[0]) != "�":
        raise AssertionError("choose another character: this token is a whole one")
    with pytest.raises(SampleError, match="no held-out sample"):
        chosen(inside_a_character, tokenizer, 1024)


def source(tokenizer: Any, start: int, tokens: int) -> list[int]:
    text = "".join(f"def function_{i}(value):\n    return {i * i}\n\n" for i in range(start, 999))
    ids: list[int] = tokenizer(text)["input_ids"][:tokens]
    assert len(ids) == tokens
    return ids


def test_a_long_sample_fills_the_cache_more_than_once(tokenizer: Any) -> None:
    """Two long samples among short ones give prompts that do not begin alike."""
    sequences = [source(tokenizer, i, 60) for i in range(20)]
    sequences += [source(tokenizer, 30, 3000), source(tokenizer, 60, 2500)]
    prompts = chosen(sequences, tokenizer, 1024)
    filled = [tuple(ids) for _, ids in prompts if len(ids) > 256]
    assert len(filled) >= 8 and len({ids[:16] for ids in filled}) == len(filled)
    assert all(tokenizer(text)["input_ids"] == ids for text, ids in prompts)
    assert too_short(prompts, 1024) is None
    lists = choose_prompts(sequences, tokenizer, 1024, len(tokenizer)).lists
    pieces = [ids for number, (_, ids) in enumerate(prompts) if number not in lists]
    joined = [any(contains(whole, ids) for whole in sequences) for ids in pieces]
    assert all(joined)  # none reaches from one sample into the next


def test_some_long_prompts_list_ids_that_no_piece_has(tokenizer: Any) -> None:
    sequences = [source(tokenizer, i, 600) for i in range(10)]
    found = choose_prompts(sequences, tokenizer, 1024, len(tokenizer))
    assert len(found.lists) == 12
    listed = [token for n in found.lists for token in found.prompts[n][1]]
    assert len(listed) == len(set(listed))
    first = {*spread(64, FIRST)}
    pieces = {token for n in first - found.lists for token in found.prompts[n][1]}
    assert not pieces & {token for n in first & found.lists for token in found.prompts[n][1]}
    assert all(tokenizer(text)["input_ids"] == ids for text, ids in found.prompts)
    # No more tokens than 64 pieces have.
    assert sum(len(ids) for _, ids in found.prompts) <= sum(geometric(4, 500, 64))


def test_a_short_admission_has_the_frequent_ids(tokenizer: Any, example_samples: Path) -> None:
    """14 % of held-out tokens were in no prompt, and 28 % in none of an admission's first 24."""
    lines = (example_samples / "heldout.jsonl").read_text().splitlines()
    sequences = [tokenizer(json.loads(line)["text"])["input_ids"] for line in lines]
    prompts = chosen(sequences, tokenizer, 1024)
    assert outside(sequences, prompts) < 0.01
    first = [prompts[n] for n in spread(64, FIRST)]
    assert outside(sequences, first) < 0.07
    # With 73 tokens for what clients get, no more than when golden prompts were all of it.
    assert sum(len(ids) + POSITIONS for _, ids in first) + 73 <= 2826


def test_ids_beyond_the_models_vocabulary_are_not_listed(tokenizer: Any) -> None:
    sequences = [[token for token in source(tokenizer, 0, 400) if token < 300]]
    found = choose_prompts(sequences, tokenizer, 1024, 300)
    assert max(token for _, ids in found.prompts for token in ids) < 300
    assert len(found.prompts) == 64  # pieces take the place of lists when no id is left


class LooksFarBack:
    """Encodes to even ids only, from the 31st on."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, texts: Any, **options: Any) -> dict[str, Any]:
        found = self._tokenizer(texts, **options)["input_ids"]
        if isinstance(texts, str):
            return {"input_ids": _even_after_30(found)}
        return {"input_ids": [_even_after_30(ids) for ids in found]}


def _even_after_30(ids: list[int]) -> list[int]:
    return [*ids[:30], *(token - token % 2 for token in ids[30:])]


def test_lists_encode_to_themselves_though_the_tokenizer_looks_far_back(tokenizer: Any) -> None:
    tokenizer = LooksFarBack(tokenizer)
    listed = Unlisted(tokenizer, len(tokenizer.get_vocab()), []).listed(60)
    text = tokenizer.decode(listed, clean_up_tokenization_spaces=False)
    assert len(listed) > 40
    assert tokenizer(text)["input_ids"] == listed


def outside(sequences: list[list[int]], prompts: list[tuple[str, list[int]]]) -> float:
    """The share of the tokens whose ids are in no prompt."""
    had = {token for _, ids in prompts for token in ids}
    tokens = [token for ids in sequences for token in ids]
    return sum(token not in had for token in tokens) / len(tokens)


def geometric(first: int, last: int, count: int) -> list[int]:
    return [round(x) for x in np.geomspace(first, last, count)]


def test_short_samples_are_warned_of(tokenizer: Any) -> None:
    prompts = chosen([source(tokenizer, i, 100) for i in range(20)], tokenizer, 1024)
    lengths = [len(ids) for _, ids in prompts]
    filled = sum(length > 256 for length in lengths)  # lists of token ids, which can be as long
    warning = too_short(prompts, 1024)
    assert warning is not None and sum(length > 100 for length in lengths) < 11
    assert warning.startswith(
        f"{filled} of 64 golden prompts have more than 256 tokens, the longest has {max(lengths)}"
    )
    # A model whose context is no longer has nothing to be shown there.
    assert too_short(chosen([source(tokenizer, 0, 100)] * 20, tokenizer, 116), 116) is None


def contains(whole: list[int], part: list[int]) -> bool:
    return any(whole[n : n + len(part)] == part for n in range(len(whole)))
