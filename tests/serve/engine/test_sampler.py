"""The sampler against brute force, and its independence of the batch."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.engine.sampler import Sampling, log_softmax, sample, top_logprobs

VOCABULARY = 50


def some_logits(rows: int, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return (generator.standard_normal((rows, VOCABULARY)) * 2).astype(np.float32)


def seeded(seed: int, **settings: float) -> Sampling:
    return Sampling(generator=np.random.Generator(np.random.PCG64(seed)), **settings)


def allowed(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """The probabilities that remain, by the definition: sort, cut, renormalize."""
    scaled = logits.astype(np.float64) / temperature
    order = sorted(range(len(logits)), key=lambda t: -scaled[t])
    kept = order[:top_k] if top_k else order
    weights = {t: np.exp(scaled[t] - scaled[order[0]]) for t in kept}
    total, mass, nucleus = sum(weights.values()), 0.0, []
    for token in kept:
        nucleus.append(token)
        mass += weights[token] / total
        if mass >= top_p:
            break
    result = np.zeros(len(logits))
    for token in nucleus:
        result[token] = weights[token] / sum(weights[t] for t in nucleus)
    return result


def test_greedy_takes_the_largest_and_the_lowest_id_of_a_tie() -> None:
    logits = some_logits(3)
    logits[1, [7, 31]] = 100
    tokens = sample(logits, [Sampling(temperature=0)] * 3)
    assert tokens.tolist() == [int(logits[0].argmax()), 7, int(logits[2].argmax())]


def test_top_k_of_one_is_greedy_at_any_temperature() -> None:
    logits = some_logits(4)
    tokens = sample(logits, [Sampling(temperature=5, top_k=1)] * 4)
    assert tokens.tolist() == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.7), (8, 0.6), (0, 1e-9)])
def test_draws_have_the_defined_distribution(temperature: float, top_k: int, top_p: float) -> None:
    logits = some_logits(1)[0]
    expected = allowed(logits, temperature, top_k, top_p)
    sampling = seeded(1, temperature=temperature, top_k=top_k, top_p=top_p)
    rows = np.tile(logits, (500, 1))
    draws = np.concatenate([sample(rows, [sampling] * 500) for _ in range(20)])
    counts = np.bincount(draws, minlength=VOCABULARY)
    assert not counts[expected == 0].any(), "a token was drawn that top-k or top-p excludes"
    # Four standard deviations of a binomial count, of at most 50 tokens.
    deviation = np.sqrt(len(draws) * expected * (1 - expected))
    assert (np.abs(counts - len(draws) * expected) <= 4.5 * deviation + 1e-9).all()


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    temperature=st.floats(0.01, 10),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(0, 60),
)
def test_a_seeded_draw_does_not_depend_on_the_batch(
    seed: int, temperature: float, top_p: float, top_k: int
) -> None:
    logits = some_logits(7, seed)
    mine = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    alone = [int(sample(logits[3:4], [sampling])[0]) for sampling in [seeded(seed, **mine)] * 5]
    others = [
        Sampling(),
        Sampling(0),
        Sampling(0.5, 0.9),
        Sampling(2, 1, 3),
        Sampling(),
        Sampling(),
    ]
    sampling = seeded(seed, **mine)
    together = [int(sample(logits, [*others[:3], sampling, *others[3:]])[3]) for _ in range(5)]
    assert together == alone


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_numbers_is_told_and_spares_the_others(
    bad: float, temperature: float
) -> None:
    logits = some_logits(3)
    logits[1, 20] = bad
    tokens = sample(logits, [seeded(0, temperature=temperature)] * 3)
    assert tokens[1] == -1 and (tokens[[0, 2]] >= 0).all()


def test_excluded_tokens_are_never_drawn() -> None:
    logits = np.full((1, VOCABULARY), -np.inf, np.float32)
    logits[0, 11] = 3
    assert sample(logits, [Sampling()]).tolist() == [11]


def test_tiny_temperatures_and_huge_logits_stay_finite() -> None:
    logits = np.array([[1e30, -1e30, 0.0]], np.float32)
    assert sample(logits, [Sampling(temperature=1e-4)]).tolist() == [0]


def test_log_softmax_matches_the_definition() -> None:
    logits = some_logits(4) + np.float32(1000)
    wide = logits.astype(np.longdouble) - 1000
    expected = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    np.testing.assert_allclose(log_softmax(logits), expected.astype(float), rtol=0, atol=1e-12)


def test_top_logprobs_are_ordered_and_break_ties_by_id() -> None:
    logprobs = np.array([-3.0, -1.0, -2.0, -1.0, -9.0, -2.0])
    assert top_logprobs(logprobs, 4) == [1, 3, 2, 5]
    assert top_logprobs(logprobs, 3) == [1, 3, 2]
    assert top_logprobs(logprobs, 0) == []
    assert top_logprobs(logprobs, 99) == [1, 3, 2, 5, 0, 4]
