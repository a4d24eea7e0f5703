"""The divergence over the likeliest tokens, against its plain definition and the full one."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octet.proof import top_k
from octet.proof.top_k import TopK, top_k_divergence
from tests.plain_divergence import plain_divergence


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return np.asarray(logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True)))


def likeliest(logprobs: np.ndarray, k: int) -> TopK:
    ids = np.argsort(-logprobs, axis=-1)[:, :k]
    return TopK(ids, np.take_along_axis(logprobs, ids, axis=-1))


def pair(seed: int, noise: float, vocabulary: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities [6, V] of two models."""
    random = np.random.default_rng(seed)
    logits = 2 * random.normal(size=(6, vocabulary))
    return log_softmax(logits), log_softmax(logits + noise * random.normal(size=logits.shape))


def full(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return np.asarray((np.exp(p) * (p - q)).sum(axis=-1))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 40), st.data(), st.floats(0.001, 3.0))
def test_lists_of_any_length_give_what_the_definition_gives(
    seed: int, vocabulary: int, data: st.DataObject, noise: float
) -> None:
    sizes = st.integers(1, min(20, vocabulary))
    reference, served = (
        [
            dict(zip(top.ids[0].tolist(), top.logprobs[0].tolist(), strict=True))
            for row in logprobs
            for top in [likeliest(row[None], data.draw(sizes))]
        ]
        for logprobs in pair(seed, noise, vocabulary)
    )
    found = top_k_divergence(TopK.of(reference), TopK.of(served))
    expected = [plain_divergence(p, q) for p, q in zip(reference, served, strict=True)]
    assert found.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("noise", [0.3, 2.0])
def test_it_is_a_lower_bound_that_meets_the_full_divergence(seed: int, noise: float) -> None:
    p, q = pair(seed, noise)
    whole = top_k_divergence(likeliest(p, 200), likeliest(q, 200))
    assert whole == pytest.approx(full(p, q), rel=1e-5)
    for k in (1, 5, 20):
        found = top_k_divergence(likeliest(p, k), likeliest(q, k))
        assert (found >= 0).all() and (found <= whole + 1e-9).all()
    assert found.mean() > 0.3 * whole.mean()


def test_equal_distributions_have_none_and_disjoint_support_is_infinite() -> None:
    p = TopK.of([{1: math.log(0.5), 2: math.log(0.25)}])
    nothing_left = TopK.of([{1: math.log(0.75), 2: math.log(0.25)}])
    assert top_k_divergence(p, p) == 0.0
    assert top_k_divergence(p, nothing_left) == math.inf
    assert 2 < top_k_divergence(p, nothing_left, least=1e-7)[0] < 10


def test_a_model_that_prefers_other_tokens_is_far_away() -> None:
    """None of the reference's tokens is served: nothing is shared, and yet much is known."""
    logits = -0.5 * np.arange(200)[None]
    p, q = log_softmax(logits), log_softmax(-logits)
    assert 5 < top_k_divergence(likeliest(p, 20), likeliest(q, 20))[0] < full(p, q)[0]


def test_many_positions_are_compared_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    p, q = (likeliest(logprobs, 5) for logprobs in pair(1, 0.1, 12))
    whole = top_k_divergence(p, q)
    for pairs in (1, 50, 100):  # one position, two, four and a rest
        monkeypatch.setattr(top_k, "_AT_ONCE", pairs)
        assert np.array_equal(top_k_divergence(p, q), whole)
    assert top_k_divergence(p[:0], q[:0]).shape == (0,)
