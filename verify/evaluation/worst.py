"""Finds the tokens at which an artifact differs most from the reference, and quotes their text.

Stores at most `COUNT` tokens of an artifact, each with `CONTEXT` tokens before it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from octet.proof.top_k import TopK
from verify.evaluation.scores import Scores
from verify.evaluation.sequences import Sequences

__all__ = ["CONTEXT", "COUNT", "Decode", "Guess", "WorstToken", "worst_tokens"]

COUNT = 10
CONTEXT = 32  # tokens quoted before each
_CHARACTERS = 240  # of a quotation: a single token can be a long run of spaces

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Guess:
    """The token that a model held most likely, and its natural log-probability."""

    token: str
    logprob: float


@dataclass(frozen=True)
class WorstToken:
    """A token of a sample, after `position` others of which `before` quotes the last.

    `kl` is the divergence there in nats, None without a reference checkpoint. `logprob` is what
    the artifact assigned to the token, `reference_logprob` what the reference did (or the first
    artifact, if there is no reference). `before` starts with … if it is not all of the text.
    """

    origin: str
    position: int
    before: str
    token: str
    token_id: int
    kl: float | None
    logprob: float
    reference_logprob: float
    likeliest: Guess
    reference_likeliest: Guess


def worst_tokens(
    one: Scores, base: Scores, sequences: Sequences, decode: Decode | None
) -> tuple[WorstToken, ...]:
    """Returns the tokens with the largest divergence, the largest first.

    Without divergences, those of which `one` lost the most log-probability against `base`. Without
    a tokenizer to decode with, ⟨7⟩ stands for token 7.
    """
    losses = one.kl or tuple(a - b for a, b in zip(one.nll, base.nll, strict=True))
    places = [(sample, at) for sample, loss in enumerate(losses) for at in range(len(loss))]
    flat = np.concatenate(losses)
    largest = np.argsort(-flat, kind="stable")[:COUNT]
    return tuple(
        _quote(one, base, sequences, decode or _spelled_as_ids, *places[index])
        for index in largest
        if flat[index] > 0
    )


def _quote(
    one: Scores, base: Scores, sequences: Sequences, decode: Decode, sample: int, at: int
) -> WorstToken:
    """Describes position `at` of a sample, at which token `at + 1` is predicted."""
    ids = sequences.ids[sample]
    before = ids[max(at + 1 - CONTEXT, 0) : at + 1]
    text = decode(before)
    token = _following(decode, before, text, ids[at + 1])
    return WorstToken(
        origin=sequences.origins[sample],
        position=at + 1,
        before=_end(text, cut=at + 1 > CONTEXT),
        token=token,
        token_id=ids[at + 1],
        kl=None if one.kl is None else float(one.kl[sample][at]),
        logprob=-float(one.nll[sample][at]),
        reference_logprob=-float(base.nll[sample][at]),
        likeliest=_guess(one.likeliest[sample], at, decode, before, text),
        reference_likeliest=_guess(base.likeliest[sample], at, decode, before, text),
    )


def _end(text: str, *, cut: bool) -> str:
    """Returns the end of a text, after an ellipsis if there was more."""
    if not cut and len(text) <= _CHARACTERS:
        return text
    return "…" + text[-_CHARACTERS:].lstrip("\ufffd")  # the rest of a character that was cut


def _guess(top: TopK, at: int, decode: Decode, before: Sequence[int], text: str) -> Guess:
    token = _following(decode, before, text, int(top.ids[at, 0]))
    return Guess(token, float(top.logprobs[at, 0]))


def _following(decode: Decode, before: Sequence[int], text: str, token: int) -> str:
    """Returns what `token` adds to the text; alone, some tokenizers drop its leading space."""
    whole = decode([*before, token])
    added = whole.removeprefix(text) if whole.startswith(text) else ""
    return (added or decode([token]))[:_CHARACTERS]


def _spelled_as_ids(ids: Sequence[int]) -> str:
    return "".join(f"⟨{token}⟩" for token in ids)
