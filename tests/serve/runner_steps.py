"""Steps of a runner, without the engine around it."""

from typing import Any

import numpy as np

from serve.runner.protocol import Runner, StepBatch

__all__ = ["forward", "prompt_of"]


def prompt_of(length: int) -> np.ndarray:
    """Token ids [1, length], the same ones each time."""
    return np.random.default_rng(length).integers(1, 4096, (1, length))


def forward(
    runner: Runner, cache: Any, tokens: np.ndarray, slots: list[int], wanted: Any
) -> np.ndarray:
    """Logits of `tokens` [B, T] behind what the cache has in `slots`, at the `wanted` positions."""
    step = StepBatch(tokens.astype(np.int64), slots, np.asarray(wanted, np.int64))
    return runner.forward(step, cache).copy()
