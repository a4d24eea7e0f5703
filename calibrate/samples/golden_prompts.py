"""Chooses golden prompts: pieces of held-out samples, and lists of the token ids they lack.

Lengths are spread evenly on a logarithmic scale, so that some prompts are prefilled at once and
some fill the cache well, from which decoding then reads. A piece never joins two samples: a model
has not learnt to expect the text that follows a sample.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from calibrate.samples.vocabulary import Unlisted
from octet.artifacts.golden import FIRST, spread
from octet.errors import SampleError

__all__ = ["CONTINUATION", "LONGEST", "READ", "Chosen", "choose_prompts", "too_short"]

PROMPTS = 64
SHORTEST, LONGEST = 4, 500  # tokens
READ = 16 * LONGEST  # tokens of a sample, at most, that prompts are cut from
CONTINUATION = 16  # tokens that follow a prompt; fewer where the model ends its text

_BEND = 1.05  # makes middle lengths up to 5 % shorter; 1: all evenly spaced
_FILLED = 256  # tokens in a well-filled cache
_ENOUGH = 8  # prompts that fill it
_LISTED = 64  # tokens of the shortest list of ids
_SHIFTS = 8  # tokens by which a start inside a sample may move, to where text can be cut


@dataclass(frozen=True)
class Chosen:
    """64 prompts, shortest first, as (text, token ids); each text encodes to its ids.

    Those whose numbers are in `lists` are lists of token ids (`calibrate.samples.vocabulary`).
    """

    prompts: list[tuple[str, list[int]]]
    lists: frozenset[int]


def choose_prompts(
    sequences: Sequence[Sequence[int]], tokenizer: Any, max_positions: int, vocab_size: int
) -> Chosen:
    """Chooses pieces of held-out sequences and, as some of the long prompts, lists of other ids.

    Each piece is the beginning of a sequence; sequences take turns, longest prompts first. If a
    sequence is shorter than its turn's prompt, tokens of another one that no prompt has taken yet
    are used, if there are enough. Where ids are too few for a list, a piece takes its place.

    A prompt is shortened until its end neither cuts through a character nor separates what the
    tokenizer would join. Raises SampleError if nothing can be cut from `sequences`.
    """
    lengths = _lengths(max_positions)
    pieces = _Pieces(sequences, tokenizer)
    unlisted = Unlisted(tokenizer, vocab_size, sequences)
    turns = range(len(lengths))[::-1]
    first = spread(len(lengths), FIRST)  # sent first by an admission, whose lists are made first
    rest = [turn for turn in turns if turn not in first]
    found = {
        turn: pieces.cut(lengths[turn])
        for turn in turns
        if lengths[turn] < _LISTED or (turn % 3 != 1 if turn in first else turn % 2)
    }
    lists = set[int]()
    for part in (first[::-1], rest):
        unlisted.take(token for turn in part if turn in found for token in found[turn][1])
        for turn in (turn for turn in part if turn not in found):
            listed = _cut(unlisted.listed(lengths[turn]), tokenizer, lengths[turn] // 2)
            if listed is not None:
                lists.add(turn)
                unlisted.take(listed[1])
            found[turn] = listed or pieces.cut(lengths[turn])
    order = sorted(found, key=lambda turn: (len(found[turn][1]), turn))
    return Chosen(
        [found[turn] for turn in order], frozenset(n for n, x in enumerate(order) if x in lists)
    )


def too_short(prompts: Sequence[tuple[str, list[int]]], max_positions: int) -> str | None:
    """Returns a warning if too few prompts let decoding read a well-filled cache.

    It applies where the model's context allows longer prompts, and says what the prompts cannot
    show.
    """
    filled = _FILLED * _lengths(max_positions)[-1] // LONGEST
    lengths = [len(ids) for _, ids in prompts]
    count = sum(length > filled for length in lengths)
    if count >= _ENOUGH:
        return None
    return (
        f"{count} of {len(prompts)} golden prompts have more than {filled} tokens, the longest has"
        f" {max(lengths)}: they cannot show what goes wrong in a cache that is fuller than that;"
        f" hold out {_ENOUGH} samples or more of {2 * filled} tokens (--held-out)"
    )


def _lengths(max_positions: int) -> list[int]:
    """Returns the lengths of the prompts, ascending."""
    longest = max(1, min(LONGEST, max_positions - CONTINUATION))
    shortest = min(SHORTEST, longest)
    ratios = np.linspace(0, 1, PROMPTS) ** _BEND
    return [int(length) for length in (shortest * (longest / shortest) ** ratios).round()]


class _Pieces:
    """Cuts pieces of sequences, which take turns; call it for the longest pieces first."""

    def __init__(self, sequences: Sequence[Sequence[int]], tokenizer: Any) -> None:
        self._sequences, self._tokenizer = sequences, tokenizer
        self._lead = list(tokenizer("")["input_ids"])  # what begins any text, such as a BOS
        self._order = sorted(range(len(sequences)), key=lambda n: -min(len(sequences[n]), LONGEST))
        self._taken = [0] * len(sequences)  # tokens that were taken from each beginning

    def cut(self, length: int) -> tuple[str, list[int]]:
        """Cuts up to `length` tokens; raises SampleError if no sequence begins with whole text."""
        order = list(self._order)
        self._order.append(self._order.pop(0))
        if len(self._sequences[order[0]]) < length and (untaken := self._next_cut(length)):
            return untaken
        for index in order:
            found = _cut(list(self._sequences[index][:length]), self._tokenizer)
            if found is not None:
                self._taken[index] = max(self._taken[index], len(found[1]))
                return found
        raise SampleError("no held-out sample starts with text that encodes back to its tokens")

    def _next_cut(self, length: int) -> tuple[str, list[int]] | None:
        """Cuts after the tokens taken from the sequence with the most tokens left."""
        left = [len(ids) - n for ids, n in zip(self._sequences, self._taken, strict=True)]
        index = left.index(max(left))
        for start in range(self._taken[index], self._taken[index] + _SHIFTS):
            if start + length > len(self._sequences[index]):
                return None
            piece = _piece(self._sequences[index], start, length, self._lead)
            found = _cut(piece, self._tokenizer, length // 2)
            if found is not None:
                self._taken[index] = start + length
                return found
        return None


def _piece(ids: Sequence[int], start: int, length: int, lead: list[int]) -> list[int]:
    """Returns `length` tokens from `start`.

    A piece from inside a sequence that begins with `lead` begins with `lead` too, which counts
    among the `length` tokens.
    """
    before = lead if start and list(ids[: len(lead)]) == lead else []
    return [*before, *ids[start : start + length - len(before)]]


def _cut(ids: list[int], tokenizer: Any, least: int = 0) -> tuple[str, list[int]] | None:
    """Returns the longest prefix of `ids`, of more than `least` tokens, that a text encodes to."""
    for end in range(len(ids), least, -1):
        head = ids[:end]
        for text in _spelled(head, tokenizer):
            if text and tokenizer(text)["input_ids"] == head:
                return text, head
        if least and end == len(ids) - _SHIFTS:
            return None  # no text that starts here encodes to its tokens
    return None


def _spelled(ids: list[int], tokenizer: Any) -> Iterator[str]:
    """Yields texts that may encode to `ids`; a conversation's special tokens must be spelled out.

    The first special token is left out in the last try: the tokenizer may add it to any text.
    """
    special = bool(set(ids) & set(tokenizer.all_special_ids))
    for part, skip in ((ids, True), (ids, False), (ids[1:], False)) if special else ((ids, True),):
        yield tokenizer.decode(part, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
