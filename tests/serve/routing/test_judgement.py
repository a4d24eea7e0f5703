"""Rulings on answers whose divergence is known."""

import numpy as np
import pytest

from serve.config import Judge
from serve.routing.judgement import Judgement

TOKENS = 32


def ruling(share: float, ruined: float, answers: int, seed: int) -> str:
    """Judges answers, a `share` of which diverge by `ruined` nats, and the others by nothing."""
    random = np.random.default_rng(seed)
    judgement = Judgement(Judge(reference="bf16", max_kl=0.02))
    for _ in range(answers):
        total = ruined if random.random() < share else random.normal(0.0, 0.1)
        judgement.add(total, TOKENS, agreed=TOKENS)
        if judgement.ruling != "undecided":
            break
    return judgement.ruling


@pytest.mark.parametrize("seed", range(5))
def test_a_pool_that_ruins_a_tenth_of_its_answers_is_not_within(seed: int) -> None:
    """Each counts as no more than the clip, but the plain mean has them whole."""
    assert ruling(0.1, 60.0, 200, seed) != "within"


def test_a_pool_without_such_answers_is_within() -> None:
    assert ruling(0.0, 60.0, 200, 0) == "within"


def test_one_ruined_answer_does_not_roll_a_pool_back() -> None:
    judgement = Judgement(Judge(reference="bf16", max_kl=0.02))
    judgement.add(float("inf"), TOKENS, agreed=0)
    for _ in range(60):
        judgement.add(0.0, TOKENS, agreed=TOKENS)
    assert judgement.ruling == "undecided"
    assert "plain mean inf" in judgement.sentence()
