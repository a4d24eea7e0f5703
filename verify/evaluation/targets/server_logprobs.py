"""Requests and parses the log-probabilities of a prompt, in the two forms of servers."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verify.evaluation.target import Answer

__all__ = ["READERS", "AnotherTokenizer", "NotReturned", "Reader"]


class NotReturned(Exception):
    """The server left out what was requested."""


class AnotherTokenizer(Exception):
    """The server read other tokens than those it was sent."""


@dataclass(frozen=True)
class Reader:
    """One way to get the log-probabilities of a prompt.

    `fields` gives the request's fields for k alternatives and a salt; `read` parses a choice.
    """

    fields: Callable[[int, str], dict[str, Any]]
    read: Callable[[Mapping[str, Any], Sequence[int], int], Answer]


def _of_prompt_logprobs(choice: Mapping[str, Any], ids: Sequence[int], k: int) -> Answer:
    """Parses vLLM's form: null for the first token, then {token id: {"logprob": ...}} for each."""
    listed = choice.get("prompt_logprobs")
    if not listed:
        raise NotReturned("ignored")
    _require_as_many(len(listed), len(ids))
    positions = [
        {int(token): _number(entry["logprob"]) for token, entry in position.items()}
        for position in listed[1:]
    ]
    return _answer(positions, ids, k)


def _of_echo(choice: Mapping[str, Any], ids: Sequence[int], k: int) -> Answer:
    """Parses OpenAI's form: the prompt's tokens before those generated, named `token_id:N`."""
    found = choice.get("logprobs") or {}
    names: Sequence[str] = found.get("tokens") or ()
    tops: Sequence[Mapping[str, float | None]] = found.get("top_logprobs") or ()
    if len(names) < len(ids) or not tops:
        raise NotReturned("ignored")
    if not names[0].startswith("token_id:"):
        raise NotReturned("names tokens by their text, which several tokens may share")
    if tuple(map(_id_of, names[: len(ids)])) != tuple(ids):
        raise AnotherTokenizer("it read other tokens than it was sent")
    positions = [
        {_id_of(name): _number(value) for name, value in top.items()} for top in tops[1 : len(ids)]
    ]
    return _answer(positions, ids, k)


READERS = {
    "prompt_logprobs": Reader(
        lambda k, salt: {"prompt_logprobs": k, "cache_salt": salt}, _of_prompt_logprobs
    ),
    "echo": Reader(
        lambda k, salt: {"echo": True, "logprobs": k, "return_tokens_as_token_ids": True}, _of_echo
    ),
}


def _answer(positions: Sequence[Mapping[int, float]], ids: Sequence[int], k: int) -> Answer:
    """Builds an answer from {token id: log-probability} of each position.

    A position has the k most likely tokens, and the token that came if it is not one of them.
    """
    fewest = min(map(len, positions))
    if fewest < k:
        raise NotReturned(f"{fewest} log-probabilities at a position, and {k} were requested")
    if any(token not in position for token, position in zip(ids[1:], positions, strict=True)):
        raise AnotherTokenizer("it returns no log-probabilities of the tokens that it was sent")
    tops = [sorted(position.items(), key=lambda item: -item[1])[:k] for position in positions]
    chosen = [position[token] for token, position in zip(ids[1:], positions, strict=True)]
    return Answer(
        np.array(chosen, np.float32),
        np.array([[token for token, _ in top] for top in tops], np.int32),
        np.array([[value for _, value in top] for top in tops], np.float32),
    )


def _require_as_many(read: int, sent: int) -> None:
    if read != sent:
        raise AnotherTokenizer(f"it read {read} tokens where {sent} were sent")


def _id_of(name: str) -> int:
    return int(name.removeprefix("token_id:"))


def _number(value: float | None) -> float:
    """Converts null to NaN: JSON has no NaN, so servers write null."""
    return math.nan if value is None else float(value)
