"""Cuts golden prompts from held-out samples: pieces of mixed lengths, sent to a server as text.

Lengths are spread evenly on a logarithmic scale, so that some prompts are prefilled at once and
some fill the cache well, from which decoding then reads. A piece never joins two samples: a model
has not learnt to expect the text that follows a sample.
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

_FILLED = 256  # tokens in a well-filled cache
_ENOUGH = 8  # prompts that fill it
_SHIFTS = 8  # tokens by which a start inside a sample may move, to where text can be cut


def choose_prompts(
    sequences: Sequence[Sequence[int]], tokenizer: Any, max_positions: int
) -> list[tuple[str, list[int]]]:
    """Returns 64 prompts, shortest first, as (text, token ids); each text encodes to its ids.

    Each prompt is the beginning of a held-out sequence; sequences take turns, longest prompts
    first. If a sequence is shorter than its turn's prompt, tokens of another one that no prompt has
    taken yet are used, if there are enough.

    A prompt is shortened until its end neither cuts through a character nor separates what the
    tokenizer would join. Raises SampleError if nothing can be cut from `sequences`.
    """
    lengths = _lengths(max_positions)[::-1]
    lead = list(tokenizer("")["input_ids"])  # what the tokenizer adds to any text, such as a BOS
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
    return prompts[::-1]


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


def _untaken(
    sequences: Sequence[Sequence[int]],
    taken: list[int],
    length: int,
    tokenizer: Any,
    lead: list[int],
) -> tuple[str, list[int]] | None:
    """Cuts a prompt after the tokens taken from the sequence with the most tokens left."""
    index = max(range(len(sequences)), key=lambda n: len(sequences[n]) - taken[n])
    for start in range(taken[index], taken[index] + _SHIFTS):
        if start + length > len(sequences[index]):
            return None
        found = _cut(_piece(sequences[index], start, length, lead), tokenizer, length // 2)
        if found is not None:
            taken[index] = start + length
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
            return None  # the text cannot be cut at this start
    return None


def _spelled(ids: list[int], tokenizer: Any) -> Iterator[str]:
    """Yields texts that may encode to `ids`; a conversation's special tokens must be spelled out.

    The first one is left out where the tokenizer adds it to any text.
    """
    special = bool(set(ids) & set(tokenizer.all_special_ids))
    for part, skip in ((ids, True), (ids, False), (ids[1:], False)) if special else ((ids, True),):
        yield tokenizer.decode(part, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
