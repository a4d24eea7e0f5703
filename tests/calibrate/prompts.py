"""Chooses the golden prompts of the same samples once in a process.

Listing token ids takes a second, and most tests calibrate on the same few samples.
"""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest

from calibrate.samples import inputs
from calibrate.samples.golden_prompts import Chosen, choose_prompts

__all__ = ["choose_once"]


def choose_once(patch: pytest.MonkeyPatch) -> None:
    """Makes calibrations remember the prompts by all that they depend on."""
    known: dict[tuple[Any, ...], Chosen] = {}

    def choose(sequences: Sequence[Sequence[int]], tokenizer: Any, *sizes: int) -> Chosen:
        read = tokenizer.backend_tokenizer.to_str(), tuple(tokenizer.all_special_ids)
        key = (*read, *sizes, *map(tuple, sequences))
        if key not in known:
            known[key] = choose_prompts(sequences, tokenizer, *sizes)
        return deepcopy(known[key])

    patch.setattr(inputs, "choose_prompts", choose)
