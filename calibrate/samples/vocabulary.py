"""Lists token ids that no prompt has yet, as prompts of their own.

A wrong embedding can be detected only by a prompt that holds its token, and text repeats few
tokens. A list holds each of its ids once, so it covers as many ids as it has tokens. Ids that are
frequent in the samples are listed first, and stand at the end of a list, where they affect the
answer most. The others are in random order, because a fault may affect one range of ids.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

__all__ = ["Unlisted"]

_TRIES = 16  # ids that are tried as the next one, before the first of them is left out
_SPARE = 4  # one id in so many is added to the candidates, because not all fit
_AT_ONCE = 4  # tries that the tokenizer encodes in one call
_TAIL = 8  # ids that are encoded before a new one to see if it fits; a whole list takes seconds


class Unlisted:
    """The token ids that no prompt has yet; special and added tokens are not among them."""

    def __init__(self, tokenizer: Any, vocab_size: int, sequences: Sequence[Sequence[int]]) -> None:
        self._tokenizer = tokenizer
        self._lead = list(tokenizer("")["input_ids"])
        added = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        ids = sorted({i for i in tokenizer.get_vocab().values() if i < vocab_size} - added)
        mixed = np.random.Generator(np.random.PCG64(0)).permutation(np.array(ids, int)).tolist()
        counts = Counter(token for sequence in sequences for token in sequence)
        self._ids = sorted(mixed, key=lambda i: -counts[i])

    def take(self, ids: Iterable[int]) -> None:
        """Removes `ids`, which a prompt has."""
        had = set(ids)
        self._ids = [i for i in self._ids if i not in had]

    def listed(self, length: int) -> list[int]:
        """Returns up to `length` ids whose joint text encodes to them; fewer if no more fit."""
        found, unfit = self._listed(length, _TAIL)
        if self._encoded([found])[0] != found:  # a tokenizer that looks further back
            found, unfit = self._listed(length, length)
        self._ids.sort(key=unfit.__contains__)  # later lists try them last
        return found

    def _listed(self, length: int, tail: int) -> tuple[list[int], set[int]]:
        """Returns a list whose ids each fit after `tail` others, and the ids that did not fit."""
        found = list(self._lead)
        more = length + length // _SPARE + _TRIES
        left = self._ids[:length][::-1] + self._ids[length:more]
        unfit = set[int]()
        while left and len(found) < length:
            # The first ids of a text that is cut may encode to others: only the last are compared.
            fitting = self._first_fitting(found[-2 * tail :], left[:_TRIES], tail)
            if fitting is None:
                unfit.add(left[0])
            else:
                found.append(fitting)
            left.remove(left[0] if fitting is None else fitting)
        return found, unfit

    def _first_fitting(self, found: list[int], tried: list[int], tail: int) -> int | None:
        """Returns the first of `tried` that can follow `found`, as far as the last `tail` show."""
        for start in range(0, len(tried), _AT_ONCE):
            lists = [[*found, i] for i in tried[start : start + _AT_ONCE]]
            for ids, again in zip(lists, self._encoded(lists), strict=True):
                if again[-tail - 1 :] == ids[-tail - 1 :]:
                    return ids[-1]
        return None

    def _encoded(self, lists: list[list[int]]) -> list[list[int]]:
        """Returns what the text of each of `lists` encodes to."""
        texts = [
            self._tokenizer.decode(
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            for ids in lists
        ]
        encoded: list[list[int]] = self._tokenizer(texts, return_attention_mask=False)["input_ids"]
        return encoded
