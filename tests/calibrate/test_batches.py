"""Samples become the same batches every time."""

from typing import Any

import pytest

from calibrate.batches import make_batches, tokenize
from calibrate.samples import Sample
from octet.errors import CheckpointError, SampleError


def test_longest_first_padded_on_the_right() -> None:
    sequences = [[1], [2, 2, 2], [3, 3], [4, 4, 4], [5]]
    batches = make_batches(sequences, list("abcde"), batch_size=2, pad_id=9)
    assert [batch.token_ids.tolist() for batch in batches] == [
        [[2, 2, 2], [4, 4, 4]],
        [[3, 3], [1, 9]],
        [[5]],
    ]
    assert [batch.lengths for batch in batches] == [(3, 3), (2, 1), (1,)]
    assert [batch.origins for batch in batches] == [("b", "d"), ("c", "a"), ("e",)]
    assert sum(batch.tokens for batch in batches) == 10


def test_tokens_are_the_tokenizers_cut_at_the_limit(tokenizer: Any) -> None:
    text = "def f(x):\n    return x\n" * 5
    whole, cut = (
        tokenize([Sample(text, "line 1")], tokenizer, max_length=length, vocab_size=4096)[0]
        for length in (512, 7)
    )
    assert whole == tokenizer(text)["input_ids"]
    assert cut == whole[:7]


def test_a_tokenizer_of_another_model_is_refused(tokenizer: Any) -> None:
    with pytest.raises(CheckpointError, match="do not belong together"):
        tokenize([Sample("import os", "line 1")], tokenizer, max_length=8, vocab_size=10)


def test_a_text_without_tokens_is_refused() -> None:
    def empty(texts: list[str], **_: object) -> dict[str, list[list[int]]]:
        return {"input_ids": [[] for _ in texts]}

    with pytest.raises(SampleError, match="line 3"):
        tokenize([Sample("?", "line 3")], empty, max_length=8, vocab_size=10)
