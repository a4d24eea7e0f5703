"""Perplexity, against a loop over single samples."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from calibrate.reference import perplexity
from calibrate.samples import load_samples
from octet.errors import SampleError


def test_each_sample_is_scored_by_itself(
    tiny_model: Path, tiny_samples: Path, model: Any, tokenizer: Any
) -> None:
    result = perplexity(tiny_model, tiny_samples, count=11, max_length=40)
    total, tokens = 0.0, 0
    for sample in load_samples(tiny_samples).samples[:11]:
        ids = torch.tensor(tokenizer(sample.text)["input_ids"][:40])
        with torch.inference_mode():
            logprobs = model(ids[None], use_cache=False).logits[0].double().log_softmax(-1)
        total -= float(logprobs[:-1].gather(1, ids[1:, None]).sum())
        tokens += len(ids) - 1
    assert result.tokens == tokens
    assert result.nll_sum == pytest.approx(total, rel=1e-6)
    assert result.perplexity == pytest.approx(math.exp(total / tokens), rel=1e-6)
    assert result.compute_dtype == "float32"


def test_samples_of_one_token_predict_nothing(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text('{"text": "x"}\n')
    with pytest.raises(SampleError, match="no sample has two tokens"):
        perplexity(tiny_model, path)
