"""Runs prompts through a runner: prefilled in the engine's chunks, or decoded in one batch."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from serve.runner.protocol import CHUNK, Runner, Slots, StepBatch

__all__ = ["DECODED", "PromptSteps", "teacher_forced"]

DECODED = 8  # last tokens of each prompt that are decoded, one per step


class PromptSteps:
    """A runner with a cache for `together` prompts of up to `longest` tokens."""

    def __init__(self, runner: Runner, together: int, longest: int) -> None:
        self._runner = runner
        self.together = min(runner.slots, together)
        self.cache: Slots = runner.new_cache(self.together, min(longest, runner.spec.max_positions))

    def every(self, tokens: Sequence[int]) -> Iterator[NDArray[np.float32]]:
        """Yields logits [T, V] of every position, chunk by chunk; each is valid until the next."""
        return teacher_forced(self._runner, self.cache, list(tokens))

    def read(self, tokens: Sequence[int], slot: int) -> NDArray[np.float32]:
        """Prefills `tokens`; returns the logits [V] after them."""
        for start in range(0, len(tokens), CHUNK):
            ids = np.array([tokens[start : start + CHUNK]], np.int64)
            step = StepBatch(ids, [slot], np.array([[ids.shape[1] - 1]], np.int64))
            logits = self._runner.forward(step, self.cache)
        row: NDArray[np.float32] = logits[0, 0].copy()
        return row

    def step(self, tokens: NDArray[np.int64], slots: list[int]) -> NDArray[np.float32]:
        """Decodes one more token [B, 1] in each of `slots`; returns logits [B, V]."""
        step = StepBatch(tokens, slots, np.zeros((len(slots), 1), np.int64))
        rows: NDArray[np.float32] = self._runner.forward(step, self.cache)[:, 0]
        return rows

    def decoded(self, prompts: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """Returns logits [d, V] of the last tokens of each prompt, decoded in one batch.

        Takes at most `together` prompts. d is DECODED, or all but the first token of a shorter one.
        """
        slots = self.acquire(len(prompts))
        heads = [max(1, len(prompt) - DECODED) for prompt in prompts]
        for prompt, head, slot in zip(prompts, heads, slots, strict=True):
            self.read(prompt[:head], slot)
        rows: list[list[NDArray[np.float32]]] = [[] for _ in prompts]
        for left in range(DECODED, 0, -1):  # all prompts end at the same step
            going = [i for i, prompt in enumerate(prompts) if len(prompt) - heads[i] >= left]
            if not going:
                continue
            tokens = np.array([[prompts[i][-left]] for i in going], np.int64)
            for i, row in zip(going, self.step(tokens, [slots[i] for i in going]), strict=True):
                rows[i].append(row.copy())
        self.release(slots)
        none = np.empty((0, self._runner.spec.vocab_size), np.float32)
        return [np.stack(found) if found else none for found in rows]

    def acquire(self, count: int) -> list[int]:
        slots = [self.cache.acquire() for _ in range(count)]
        found = [slot for slot in slots if slot is not None]
        assert len(found) == count
        return found

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.cache.release(slot)


def teacher_forced(runner: Runner, cache: Slots, ids: list[int]) -> Iterator[NDArray[np.float32]]:
    """Yields logits float32 [T, V] of every position of `ids`, chunk by chunk.

    Uses a free slot of `cache`. Each array is valid until the next is requested.
    """
    slot = cache.acquire()
    assert slot is not None
    try:
        for start in range(0, len(ids), CHUNK):
            tokens = np.array([ids[start : start + CHUNK]], np.int64)
            step = StepBatch(tokens, [slot], np.arange(tokens.shape[1])[None])
            yield runner.forward(step, cache)[0]
    finally:
        cache.release(slot)
