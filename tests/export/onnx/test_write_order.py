"""The ONNX decoder's results do not depend on how its work is cut up, to the last bit.

A kernel library that sums rows of different shapes in different orders fails here: FP8 would make
other tokens of that.
"""

from pathlib import Path

import numpy as np
import pytest

from tests.export.conftest import RECIPES
from tests.export.runner import WINDOW, OnnxModel, decode, prefill_and_decode, random_ids


@pytest.mark.parametrize("name", [*RECIPES, "full"])
def test_decoding_with_the_cache_equals_a_full_pass_bit_for_bit(
    name: str, decoders: dict[str, Path]
) -> None:
    prefill_and_decode(OnnxModel(decoders[name]), random_ids(1, 140)[0], prompt=20)
    prefill_and_decode(OnnxModel(decoders[name]), random_ids(1, 70)[0], prompt=64, spare=3)


def test_greedy_tokens_agree_with_recomputation(decoders: dict[str, Path]) -> None:
    model = OnnxModel(decoders["fp8"])
    ids = list(random_ids(1, 10)[0])
    cached: list[int] = []
    past, length = model.empty(1, WINDOW), len(ids)
    at = np.arange(length)
    mask = np.tril(np.ones((1, 1, length, length), bool))
    logits, new = model.step(np.array([ids]), at[None], mask, at[None, -1:], model.empty(1))
    for position in range(length, length + 24):
        for tensor, rows in zip(past, new, strict=True):
            tensor[:, :, position - rows.shape[2] : position] = rows
        cached.append(int(logits.argmax()))
        logits, new = decode(model, cached[-1], position, past)
    recomputed: list[int] = []
    for _ in cached:
        recomputed.append(int(model.forward(np.array([ids + recomputed]))[0, -1].argmax()))
    assert cached == recomputed


@pytest.mark.parametrize("name", [*RECIPES, "full"])
def test_a_row_does_not_depend_on_the_others_in_the_batch(
    name: str, decoders: dict[str, Path]
) -> None:
    """16 rows of 1 to 400 cached tokens against each row alone in a window of its own."""
    model = OnnxModel(decoders[name])
    lengths = np.random.default_rng(1).integers(1, 400, 16)
    lengths[:4] = 1, 63, 64, 65
    slots = -(-int(lengths.max()) // WINDOW) * WINDOW
    cache = model.empty(16, slots)
    for row, length in enumerate(lengths):
        at = np.arange(length)
        mask = np.tril(np.ones((1, 1, length, length), bool))
        prompt = random_ids(1, length, seed=row)
        _, new = model.step(prompt, at[None], mask, at[None, -1:], model.empty(1))
        for tensor, rows in zip(cache, new, strict=True):
            tensor[row, :, :length] = rows[0]
    ids, zeros = random_ids(16, 1), np.zeros((16, 1), np.int64)
    live = np.arange(slots) < lengths[:, None]
    mask = np.concatenate([live, np.ones((16, 1), bool)], 1)[:, None, None]
    together, _ = model.step(ids, lengths[:, None], mask, zeros, cache)
    for row, length in enumerate(lengths):
        window = -(-int(length) // WINDOW) * WINDOW
        past = [tensor[row : row + 1, :, :window] for tensor in cache]
        alone, _ = decode(model, int(ids[row, 0]), int(length), past)
        np.testing.assert_array_equal(alone[0], together[row], err_msg=f"{length} cached")
