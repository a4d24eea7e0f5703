"""Checks the contract of every runner; `same(found, expected)` fails where logits differ."""

from collections.abc import Callable

import numpy as np

from serve.runner.protocol import Runner, SlotCache
from tests.serve.runner.steps import forward, prompt_of

__all__ = ["CHECKS", "Check"]

Same = Callable[[np.ndarray, np.ndarray], None]
Check = Callable[[Runner, Same], None]


def a_slot_that_was_used_before_gives_the_same_logits(runner: Runner, same: Same) -> None:
    cache = runner.new_cache(1, 1024)
    assert cache.acquire() == 0
    fresh = forward(runner, cache, prompt_of(20), [0], [[19]])
    cache.release(0)
    assert cache.acquire() == 0
    forward(runner, cache, prompt_of(250), [0], [[0]])
    if isinstance(cache, SlotCache):
        cache.codes[0, :, :, 100:250] = 0x7F  # NaN, as a broken request would leave
    cache.release(0)
    assert cache.acquire() == 0
    np.testing.assert_array_equal(forward(runner, cache, prompt_of(20), [0], [[19]]), fresh)


def a_slot_that_changes_hands_between_steps_is_read_anew(runner: Runner, same: Same) -> None:
    """The next request in the slot has one token more, as the last one would have had."""
    cache, fresh = runner.new_cache(2, 1024), runner.new_cache(1, 1024)
    for slot, length in ((0, 21), (1, 19)):
        assert cache.acquire() == slot
        forward(runner, cache, prompt_of(length), [slot], [[0]])
    token = np.array([[5], [6]])
    forward(runner, cache, token, [0, 1], [[0], [0]])
    cache.release(1)
    assert cache.acquire() == 1
    forward(runner, cache, prompt_of(20), [1], [[0]])
    changed = forward(runner, cache, token, [0, 1], [[0], [0]])[1, 0]
    forward(runner, fresh, prompt_of(20), [0], [[0]])
    same(changed, forward(runner, fresh, token[1:], [0], [[0]])[0, 0])


def a_prompt_in_parts_gives_the_logits_of_one_pass(runner: Runner, same: Same) -> None:
    """Also where more logits are asked for than an engine gives at once."""
    tokens, cache = prompt_of(250), runner.new_cache(2, 1024)
    whole = forward(runner, cache, tokens, [0], [np.arange(250)])[0]
    parts = [
        forward(runner, cache, part, [1], [np.arange(part.shape[1])])[0]
        for part in np.split(tokens, [100, 101, 190], axis=1)
    ]
    same(np.concatenate(parts), whole)
    if isinstance(cache, SlotCache):
        np.testing.assert_array_equal(cache.codes[0], cache.codes[1])
    some = forward(runner, runner.new_cache(1, 1024), tokens, [0], [[3, 240]])[0]
    same(some, whole[[3, 240]])


CHECKS: tuple[Check, ...] = (
    a_slot_that_was_used_before_gives_the_same_logits,
    a_slot_that_changes_hands_between_steps_is_read_anew,
    a_prompt_in_parts_gives_the_logits_of_one_pass,
)
