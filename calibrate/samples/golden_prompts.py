"""Cuts golden prompts from held-out samples: pieces of mixed lengths, sent to a server as text.

Lengths are spread evenly on a logarithmic scale, so that some prompts are prefilled at once and
some fill the cache well, from which decoding then reads. A piece never joins two samples: a model
has not learnt to expect the text that follows a sample.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibrate.samples.vocabulary import Unlisted, counted
from octet.artifacts.golden import FIRST, spread
from octet.errors import SampleError

__all__ = ["CONTINUATION", "LONGEST", "READ", "choose_prompts", "too_short"]

PROMPTS = 64
SHORTEST, LONGEST = 4, 500  # tokens
READ = 16 * LONGEST  # tokens of a sample, at most, that prompts are cut from
CONTINUATION = 16  # tokens that follow a prompt; fewer where the model ends its text

_FILLED = 256  # tokens in a well-filled cache
_ENOUGH = 8  # prompts that fill it
_SHIFTS = 8  # tokens that a piece from inside a sample may be shorter, to where text can be cut
_EVERY = 3  # one prompt of so many is a list of token ids
_STEP = 32  # tokens between the starts of pieces, at least


@dataclass(frozen=True)
class Chosen:
    """64 prompts, shortest first, as (text, token ids); each text encodes to its ids.

    Those whose numbers are in `lists` are lists of token ids; the others are pieces of samples.
    """

    prompts: list[tuple[str, list[int]]]
    lists: frozenset[int]


def choose_prompts(
    sequences: Sequence[Sequence[int]], tokenizer: Any, max_positions: int, vocab_size: int
) -> Chosen:
    """Chooses golden prompts that hold as many token ids as possible.

    Each piece of a held-out sequence is the one with most ids that no prompt has yet; among those,
    the one of the sequence that fewest prompts are cut from. Every third prompt is a list of ids
    that the pieces lack, while there are any. The prompts that an admission sends first are chosen
    first.

    A prompt is shortened until its end neither cuts through a character nor separates what the
    tokenizer would join. Raises SampleError if nothing can be cut from `sequences`.
    """
    lengths = _lengths(max_positions)
    first = spread(len(lengths), FIRST)
    turns = [*first[::-1], *sorted(set(range(len(lengths))) - set(first), reverse=True)]
    pieces = _Pieces(sequences, tokenizer)
    unlisted = Unlisted(tokenizer, vocab_size, counted(sequences))
    found: dict[int, tuple[str, list[int]]] = {}
    lists = set[int]()
    for part in (turns[: len(first)], turns[len(first) :]):
        for turn in (turn for turn in part if turn % _EVERY != 1):
            found[turn] = pieces.cut(lengths[turn])
            unlisted.take(found[turn][1])
        for turn in (turn for turn in part if turn % _EVERY == 1):
            listed = _cut(unlisted.listed(lengths[turn]), tokenizer, lengths[turn] // 2)
            found[turn] = listed or pieces.cut(lengths[turn])
            lists |= {turn} if listed else set()
            unlisted.take(found[turn][1])
            pieces.take(found[turn][1])
    order = sorted(found, key=lambda turn: len(found[turn][1]))
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
    spread = np.geomspace(min(SHORTEST, longest), longest, PROMPTS)
    return [int(length) for length in spread.round()]


class _Pieces:
    """Cuts pieces of samples; each has as many token ids as possible that no prompt has yet."""

    def __init__(self, sequences: Sequence[Sequence[int]], tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._lead = list(tokenizer("")["input_ids"])  # such as a BOS
        self._sequences = [np.array(ids, int) for ids in sequences]
        self._cuts = [np.zeros(len(ids), int) for ids in sequences]  # pieces that hold a token
        self._since = [_since(ids) for ids in self._sequences]
        self._had: NDArray[np.bool_] = np.zeros(1 + max(map(max, sequences)), bool)

    def take(self, ids: Sequence[int]) -> None:
        """Counts `ids` as held by a prompt."""
        self._had[[i for i in ids if i < len(self._had)]] = True

    def cut(self, length: int) -> tuple[str, list[int]]:
        """Cuts up to `length` tokens; raises SampleError if no sample begins with whole text."""
        for index, start in self._best_first(length):
            piece = _piece(self._sequences[index].tolist(), start, length, self._lead)
            found = _cut(piece, self._tokenizer, length // 2 if start else 0)
            if found is not None:
                self._cuts[index][start : start + length] += 1
                self.take(found[1])
                return found
        raise SampleError("no held-out sample starts with text that encodes back to its tokens")

    def _best_first(self, length: int) -> Iterator[tuple[int, int]]:
        """Yields sequences and starts: whole pieces first, then by new ids, then by fewest cuts."""
        found = []
        for index, ids in enumerate(self._sequences):
            starts = np.arange(0, max(1, len(ids) - length + 1), max(length // 2, _STEP))
            ends = np.minimum(starts + length, len(ids))
            new = ~self._had[ids] & (self._since[index] >= length)
            gains, cuts = (
                np.concatenate([[0], x.cumsum()])[[ends, starts]] for x in (new, self._cuts[index])
            )
            short = 4 * (length - (ends - starts)) // length
            gain, cut = gains[0] - gains[1], cuts[0] - cuts[1]
            found.append(np.stack([np.full_like(starts, index), starts, short, -gain, cut]))
        rows = np.concatenate(found, 1)
        for number in np.lexsort(rows[[1, 4, 3, 2]]):
            yield int(rows[0, number]), int(rows[1, number])


def _since(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns how many tokens before each the same id was; the largest int where it was not."""
    order = np.argsort(ids, kind="stable")
    found = np.full(len(ids), np.iinfo(np.int64).max)
    same = ids[order[1:]] == ids[order[:-1]]
    found[order[1:][same]] = (order[1:] - order[:-1])[same]
    return found


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
            return None  # the text cannot be cut at this start
    return None


def _spelled(ids: list[int], tokenizer: Any) -> Iterator[str]:
    """Yields texts that may encode to `ids`; a conversation's special tokens must be spelled out.

    The first one is left out where the tokenizer adds it to any text.
    """
    special = bool(set(ids) & set(tokenizer.all_special_ids))
    for part, skip in ((ids, True), (ids, False), (ids[1:], False)) if special else ((ids, True),):
        yield tokenizer.decode(part, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
