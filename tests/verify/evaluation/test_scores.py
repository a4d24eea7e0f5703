"""Scores of answers: the likeliest tokens are kept, and no divergence is infinite."""

import math

import numpy as np
import pytest

from verify.evaluation.scores import Scores
from verify.evaluation.target import Answer, top_k


def test_the_most_likely_come_first() -> None:
    ids, values = top_k(np.array([[0.1, 0.5, 0.3, 0.4], [4.0, 1.0, 3.0, 2.0]]), 3)
    assert ids.tolist() == [[1, 3, 2], [0, 2, 3]]
    assert values == pytest.approx(np.array([[0.5, 0.4, 0.3], [4.0, 3.0, 2.0]]))


def test_certainty_on_another_token_is_large_and_finite() -> None:
    logits = np.zeros((2, 1, 50))
    logits[0, 0, 3] = logits[1, 0, 4] = 40.0
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    certain, other = (Answer(x[:, 0].astype(np.float32), *top_k(x, 5)) for x in logprobs)
    (kl,) = Scores.of("other", [other], [certain]).kl or ()
    assert 10 < kl[0] < math.inf
