"""Intervals that are looked at after every answer: how often they are wrong, how soon narrow."""

import math

import numpy as np
import pytest

from octet.confidence_sequence import ConfidenceSequence

LIMIT, TOKENS = 0.02, 32
GRID = LIMIT * 2.0 ** (np.arange(-40, 41) / 8)
CLIP = 1.0  # of an answer's sum; four standard deviations of those below


def sequence() -> ConfidenceSequence:
    return ConfidenceSequence(GRID, CLIP)


def test_it_excludes_the_mean_ever_in_at_most_5_percent_of_runs() -> None:
    """Looked at after each of 150 answers of random lengths; a fixed interval fails in most."""
    random, mean, wrong = np.random.default_rng(0), LIMIT, 0
    for _ in range(100):
        seen = sequence()
        for tokens in random.integers(8, TOKENS + 1, 150):
            seen.add(random.normal(mean * tokens, 0.25), int(tokens))
        wrong += not seen.now.low < mean < seen.now.high
    assert wrong <= 0.05 * 100


@pytest.mark.parametrize("mean", [0.1 * LIMIT, 3 * LIMIT])
def test_it_decides_on_which_side_of_the_limit_the_mean_is(mean: float) -> None:
    random = np.random.default_rng(1)
    seen = sequence()
    for _ in range(150):
        seen.add(random.normal(mean * TOKENS, math.sqrt(2 * mean * TOKENS)), TOKENS)
    found = seen.now
    assert found.low < mean < found.high
    assert found.high <= LIMIT if mean < LIMIT else found.low >= LIMIT


def test_it_knows_nothing_before_the_first_answers() -> None:
    seen = sequence()
    assert (seen.now.low, seen.now.high, seen.now.answers) == (0.0, math.inf, 0)
    assert math.isnan(seen.now.mean)
    seen.add(0.1, TOKENS)
    assert (seen.now.low, seen.now.high, seen.now.tokens) == (0.0, math.inf, TOKENS)


def test_one_answer_counts_as_no_more_than_the_clip() -> None:
    """So one outlier decides nothing, and infinity is a number."""
    seen = sequence()
    seen.add(math.inf, TOKENS)
    assert (seen.now.low, seen.now.mean) == (0.0, math.inf)
    for _ in range(30):
        seen.add(math.inf, TOKENS)
    assert seen.now.low >= LIMIT
