"""The divergence between two next-token distributions, from their top entries."""

import math

import numpy as np
import pytest

from octet.artifacts.golden import GoldenRecord, GoldenSet, Top, top_k_divergence
from octet.errors import ArtifactError


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def top(logprobs: np.ndarray, k: int) -> dict[int, float]:
    return {int(i): float(logprobs[i]) for i in np.argsort(-logprobs)[:k]}


@pytest.mark.parametrize("seed", range(20))
def test_lower_bound_that_meets_the_full_divergence(seed: int) -> None:
    random = np.random.default_rng(seed)
    logits = random.normal(size=50) * 3
    p, q = log_softmax(logits), log_softmax(logits + random.normal(size=50) * 0.3)
    full = float((np.exp(p) * (p - q)).sum())
    assert top_k_divergence(top(p, 50), top(q, 50)) == pytest.approx(full, rel=1e-5)
    partial = [top_k_divergence(top(p, k), top(q, k)) for k in (1, 5, 20)]
    assert all(0 <= value <= full + 1e-9 for value in partial)


def test_equal_distributions_have_none_and_disjoint_support_is_infinite() -> None:
    p = {1: math.log(0.5), 2: math.log(0.25)}
    assert top_k_divergence(p, p) == 0.0
    assert top_k_divergence(p, {1: math.log(0.75), 2: math.log(0.25)}) == math.inf


def test_a_model_that_prefers_other_tokens_is_far_away() -> None:
    """None of the reference's tokens is served: nothing is shared, and yet much is known."""
    logits = -0.5 * np.arange(200)
    p, q = log_softmax(logits), log_softmax(-logits)
    full = float((np.exp(p) * (p - q)).sum())
    assert 5 < top_k_divergence(top(p, 20), top(q, 20)) < full


@pytest.mark.parametrize("seed", range(20))
def test_tokens_that_are_not_served_keep_it_a_lower_bound(seed: int) -> None:
    random = np.random.default_rng(seed)
    logits = random.normal(size=200) * 2
    p, q = log_softmax(logits), log_softmax(logits + random.normal(size=200) * 2)
    assert not top(p, 20).keys() <= top(q, 20).keys()
    full = float((np.exp(p) * (p - q)).sum())
    assert 0 < top_k_divergence(top(p, 20), top(q, 20)) <= full


def test_a_golden_set_survives_the_disk(tmp_path) -> None:
    record = GoldenRecord(
        prompt="a b",
        prompt_token_ids=(1, 2),
        continuation_token_ids=(3,),
        tops=(Top(token_ids=(3, 4), logprobs=(-0.1, -2.5)),),
    )
    golden = GoldenSet(weights_sha256="0", compute_dtype="float32", software={}, records=(record,))
    golden.save(tmp_path)
    assert GoldenSet.load(tmp_path) == golden
    (tmp_path / "golden.json").write_text('{"records": []}')
    with pytest.raises(ArtifactError, match=r"golden.json"):
        GoldenSet.load(tmp_path)
    (tmp_path / "golden.json").write_text('{"schema_version": 3, "records": {}}')
    newer = r"golden.json: schema version 3, written by a newer Octet; this one reads up to 2"
    with pytest.raises(ArtifactError, match=newer):
        GoldenSet.load(tmp_path)
