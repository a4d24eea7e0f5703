"""Golden prompts: pieces of held-out samples, of mixed lengths, that a server is given as text.

Lengths are spread evenly on a logarithmic scale, so that some prompts are read at once and some
leave a cache well filled, from which decoding then reads. A piece never joins two samples: what
follows a sample is not what a model has learnt to expect.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from octet.errors import SampleError

__all__ = ["CONTINUATION", "LONGEST", "READ", "choose_prompts", "too_short"]

PROMPTS = 64
SHORTEST, LONGEST = 4, 500  # tokens
READ = 16 * LONGEST  # tokens of a sample, at most, that prompts are cut from
CONTINUATION = 16  # tokens that follow a prompt; fewer where the model ends its text

_FILLED = 256  # tokens of a cache that is well filled
_ENOUGH = 8  # prompts that fill it
_SHIFTS = 8  # tokens by which a start inside a sample may move, to where text can be cut
_TRIES = 16  # random starts, of which one gives a prompt


def choose_prompts(
    sequences: Sequence[Sequence[int]],
    tokenizer: Any,
    max_positions: int,
    *,
    seed: int | None = None,
) -> list[tuple[str, list[int]]]:
    """64 prompts, shortest first, as (text, token ids), where the text encodes to those very ids.

    Each is the beginning of a held-out sequence; sequences take turns, longest prompts first. Where
    one is shorter than its turn's prompt, another's tokens that no prompt has taken yet are used,
    if there are enough. With a `seed`, sequences are drawn at random, as are starts inside them,
    each sequence once before any is used twice: other golden sets of the same samples.

    A length that cuts through a character, or where the tokenizer would join what was cut, is
    shortened until it does not. Raises SampleError if nothing can be cut from `sequences`.
    """
    lengths = _lengths(max_positions)[::-1]
    lead = list(tokenizer("")["input_ids"])  # what the tokenizer adds to any text, such as a BOS
    if seed is None:
        return _first(sequences, lengths, tokenizer, lead)[::-1]
    return _drawn(sequences, lengths, tokenizer, lead, np.random.default_rng(seed))[::-1]


def too_short(prompts: Sequence[tuple[str, list[int]]], max_positions: int) -> str | None:
    """A warning where decoding never reads a well-filled cache, though the model's context allows
    it: with what that cannot show."""
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
    """Of the prompts, ascending."""
    longest = max(1, min(LONGEST, max_positions - CONTINUATION))
    spread = np.geomspace(min(SHORTEST, longest), longest, PROMPTS)
    return [int(length) for length in spread.round()]


def _first(
    sequences: Sequence[Sequence[int]], lengths: Sequence[int], tokenizer: Any, lead: list[int]
) -> list[tuple[str, list[int]]]:
    by_length = sorted(range(len(sequences)), key=lambda n: -min(len(sequences[n]), LONGEST))
    taken = [0] * len(sequences)  # tokens from the beginning
    prompts = []
    for turn, length in enumerate(lengths):
        order = [by_length[(turn + offset) % len(by_length)] for offset in range(len(by_length))]
        found = None
        if len(sequences[order[0]]) < length:
            found = _untaken(sequences, taken, length, tokenizer, lead)
        for index in () if found else order:
            found = _cut(list(sequences[index][:length]), tokenizer)
            if found is not None:
                taken[index] = max(taken[index], len(found[1]))
                break
        if found is None:
            raise SampleError("no held-out sample starts with text that encodes back to its tokens")
        prompts.append(found)
    return prompts


def _untaken(
    sequences: Sequence[Sequence[int]],
    taken: list[int],
    length: int,
    tokenizer: Any,
    lead: list[int],
) -> tuple[str, list[int]] | None:
    """A prompt from behind what was taken of the sequence that has the most tokens left."""
    index = max(range(len(sequences)), key=lambda n: len(sequences[n]) - taken[n])
    for start in range(taken[index], taken[index] + _SHIFTS):
        if start + length > len(sequences[index]):
            return None
        found = _cut(_piece(sequences[index], start, length, lead), tokenizer, length // 2)
        if found is not None:
            taken[index] = start + length
            return found
    return None


def _drawn(
    sequences: Sequence[Sequence[int]],
    lengths: Sequence[int],
    tokenizer: Any,
    lead: list[int],
    rng: np.random.Generator,
) -> list[tuple[str, list[int]]]:
    used = np.zeros(len(sequences), np.int64)
    sizes = np.array([len(ids) for ids in sequences])
    prompts = []
    for length in lengths:
        for _ in range(_TRIES):
            # Of those that are long enough, and else of the longest; the least used first.
            fit = np.flatnonzero(sizes >= min(length, sizes.max()))
            index = int(rng.choice(fit[used[fit] == used[fit].min()]))
            start = int(rng.integers(max(0, sizes[index] - length) + 1))
            piece = _piece(sequences[index], start, length, lead)
            found = _cut(piece, tokenizer, len(piece) // 2)
            if found is not None:
                used[index] += 1
                prompts.append(found)
                break
        else:
            raise SampleError(
                f"{_TRIES} random pieces of {length} tokens of the held-out samples do not encode"
                " back to their tokens"
            )
    return prompts


def _piece(ids: Sequence[int], start: int, length: int, lead: list[int]) -> list[int]:
    """`length` tokens from `start`; inside a sequence, those that come before any text included."""
    before = lead if start and list(ids[: len(lead)]) == lead else []
    return [*before, *ids[start : start + length - len(before)]]


def _cut(ids: list[int], tokenizer: Any, least: int = 0) -> tuple[str, list[int]] | None:
    """The longest beginning of `ids`, of more than `least` tokens, that text encodes back to."""
    for end in range(len(ids), least, -1):
        head = ids[:end]
        for text in _spelled(head, tokenizer):
            if text and tokenizer(text)["input_ids"] == head:
                return text, head
        if least and end == len(ids) - _SHIFTS:
            return None  # it is the start that cannot be cut
    return None


def _spelled(ids: list[int], tokenizer: Any) -> Iterator[str]:
    """Texts that may encode to `ids`: a conversation's special tokens have to be spelled out.

    Its first one is not where the tokenizer adds it to any text.
    """
    special = bool(set(ids) & set(tokenizer.all_special_ids))
    for part, skip in ((ids, True), (ids, False), (ids[1:], False)) if special else ((ids, True),):
        yield tokenizer.decode(part, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
