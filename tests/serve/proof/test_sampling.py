"""Sampled tokens against declared settings: power, and false alarms."""

import numpy as np
import pytest

from serve.proof.sampling import Sampled, Sampling, other_sampling

NEUTRAL = Sampling()
QWEN = Sampling(0.6, 20, 0.95, 0.0)
TOKENS = 64  # of a probe


def drawn(settings: Sampling, seed: int, count: int = TOKENS) -> list[Sampled]:
    """Tokens as vLLM draws them: temperature, min-p, top-k, top-p, in this order."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        logits = np.sort(random.normal(0, 3, 500))[::-1]
        logprobs = logits - np.log(np.exp(logits).sum())
        if settings.temperature == 0:
            rank = 0
        else:
            weights = np.exp((logprobs - logprobs[0]) / settings.temperature)
            weights[weights < settings.min_p] = 0
            if settings.top_k:
                weights[settings.top_k :] = 0
            weights /= weights.sum()
            weights[np.cumsum(weights) - weights >= settings.top_p] = 0
            rank = int(random.choice(len(weights), p=weights / weights.sum()))
        found.append(Sampled(rank if rank < 20 else None, tuple(logprobs[:20])))
    return found


@pytest.mark.parametrize(
    "settings",
    [
        NEUTRAL,
        QWEN,
        Sampling(0.7),
        Sampling(1.3),
        Sampling(1, 50, 0.9),
        Sampling(0),
        Sampling(1, 0, 1, 0.1),
    ],
    ids=str,
)
def test_declared_settings_are_never_refuted(settings: Sampling) -> None:
    assert all(other_sampling(settings, drawn(settings, seed)) is None for seed in range(60))


@pytest.mark.parametrize(
    ("declared", "served"),
    [
        (NEUTRAL, QWEN),
        (QWEN, NEUTRAL),
        (NEUTRAL, Sampling(0)),
        (Sampling(0), NEUTRAL),
        (Sampling(1, 0, 0.8), NEUTRAL),
    ],
    ids=str,
)
def test_other_settings_are_found(declared: Sampling, served: Sampling) -> None:
    found = [other_sampling(declared, drawn(served, seed)) for seed in range(40)]
    missed = found.count(None)
    assert missed <= 4  # one in ten


def test_the_settings_of_a_generation_config() -> None:
    config = {"temperature": 0.6, "top_k": 20, "top_p": None, "eos_token_id": 0}
    assert Sampling.of(config) == Sampling(0.6, 20)
    assert Sampling.of({"top_k": -1}) == Sampling.of({}) == NEUTRAL
