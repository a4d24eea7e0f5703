"""The vectorised divergence, against octet.artifacts.golden's of one position."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octet.artifacts.golden import top_k_divergence
from verify.evaluation import scores as divergence
from verify.evaluation.scores import divergences
from verify.evaluation.target import Answer, top_k


def answer(logits: np.ndarray, k: int) -> Answer:
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return Answer(logprobs[:, 0].astype(np.float32), *top_k(logprobs, k))


def mapping(found: Answer, position: int) -> dict[int, float]:
    ids, values = found.top_ids[position], found.top_logprobs[position]
    return {int(token): float(value) for token, value in zip(ids, values, strict=True)}


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 40), st.integers(1, 20), st.floats(0.001, 3.0))
def test_each_position_is_what_golden_records_say(
    seed: int, vocabulary: int, k: int, noise: float
) -> None:
    generator = np.random.default_rng(seed)
    k = min(k, vocabulary)
    logits = 2 * generator.normal(size=(6, vocabulary))
    moved = logits + noise * generator.normal(size=logits.shape)
    p, q = answer(logits, k), answer(moved, k)
    expected = [top_k_divergence(mapping(p, i), mapping(q, i)) for i in range(len(logits))]
    found = divergences(p, q)
    for one, other in zip(found, expected, strict=True):
        if math.isfinite(other):  # ours stays finite, of a rest that rounding hides
            assert one == pytest.approx(other, rel=1e-6, abs=2e-6)
        assert math.isfinite(one)


def test_it_bounds_the_full_divergence_from_below() -> None:
    generator = np.random.default_rng(1)
    logits = 2 * generator.normal(size=(50, 200))
    moved = logits + 0.2 * generator.normal(size=logits.shape)
    p, q = (x - np.log(np.exp(x).sum(axis=1, keepdims=True)) for x in (logits, moved))
    full = (np.exp(p) * (p - q)).sum(axis=1)
    found = divergences(answer(logits, 20), answer(moved, 20))
    assert (found <= full + 1e-6).all() and found.mean() > 0.4 * full.mean()
    assert (divergences(answer(logits, 20), answer(logits, 20)) == 0).all()


def test_certainty_on_another_token_is_large_and_finite() -> None:
    logits = np.zeros((1, 50))
    logits[0, 3] = 40.0
    moved = np.zeros((1, 50))
    moved[0, 4] = 40.0
    assert 10 < divergences(answer(logits, 5), answer(moved, 5))[0] < math.inf


def test_the_most_likely_come_first() -> None:
    ids, values = top_k(np.array([[0.1, 0.5, 0.3, 0.4], [4.0, 1.0, 3.0, 2.0]]), 3)
    assert ids.tolist() == [[1, 3, 2], [0, 2, 3]]
    assert values == pytest.approx(np.array([[0.5, 0.4, 0.3], [4.0, 3.0, 2.0]]))


def test_many_tokens_are_compared_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(1)
    logits = generator.normal(size=(7, 12))
    p, q = answer(logits, 5), answer(logits + 0.1 * generator.normal(size=logits.shape), 5)
    whole = divergences(p, q)
    for pairs in (1, 50, 60):  # one position, two, two and a rest
        monkeypatch.setattr(divergence, "_AT_ONCE", pairs)
        assert np.array_equal(divergences(p, q), whole)
