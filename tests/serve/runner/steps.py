"""Steps of a runner without the engine around it, and greedy answers of a backend over one."""

from typing import Any

import numpy as np

from serve.backends.base import Backend
from serve.engine.request import Delta
from serve.runner.protocol import Runner, StepBatch
from tests.serve.openai_clients import asked, events_of

__all__ = ["forward", "generate", "prompt_of"]


def prompt_of(length: int) -> np.ndarray:
    """Token ids [1, length], the same ones each time."""
    return np.random.default_rng(length).integers(1, 4096, (1, length))


def forward(
    runner: Runner, cache: Any, tokens: np.ndarray, slots: list[int], wanted: Any
) -> np.ndarray:
    """Logits of `tokens` [B, T] behind what the cache has in `slots`, at the `wanted` positions."""
    step = StepBatch(tokens.astype(np.int64), slots, np.asarray(wanted, np.int64))
    return runner.forward(step, cache).copy()


async def generate(backend: Backend, prompt: tuple[int, ...], count: int) -> list[int]:
    """Token ids [count] after `prompt`."""
    events = await events_of(backend, asked(prompt, model="m", max_tokens=count))
    return [token for event in events if isinstance(event, Delta) for token in event.token_ids]
