"""Sends every target the samples without a stored answer, and stores each answer on arrival."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from octet.errors import ConfigError, NumericsError
from verify.evaluation.scores import Evaluation, Scores
from verify.evaluation.sequences import Sequences
from verify.evaluation.store import AnswerStore
from verify.evaluation.target import Answer, Target

__all__ = ["Advance", "evaluate", "require_same_tokens"]

_SAME = 1e-3  # nats: the change that another order of summation can cause in a server

Advance = Callable[[str, int, int], None]  # target, predicted tokens done, of how many


def evaluate(
    targets: Sequence[Target],
    reference: Target | None,
    sequences: Sequences,
    *,
    k: int,
    out: Path | None = None,
    advance: Advance = lambda name, done, total: None,
    note: Callable[[str], None] = lambda line: None,
) -> Evaluation:
    """Scores `targets`, and `reference` if there is one, on the same samples.

    Samples with an answer in `out` are not sent again. `note` receives a line for each change since
    then. Raises ConfigError for a target with another tokenizer, NumericsError for NaN or Inf, and
    what `Target.answers` raises.
    """
    every = [*targets] if reference is None else [reference, *targets]
    for target in every:
        require_same_tokens(target, sequences)
    found = [_answers(target, sequences, k, out, advance, note) for target in every]
    base = found[0] if reference is not None else None
    scores = [
        Scores.of(target.name, answers, base) for target, answers in zip(every, found, strict=True)
    ]
    decode = next((target.decode for target in every if target.decode is not None), None)
    if reference is None:
        return Evaluation(sequences, k, None, tuple(scores), decode)
    return Evaluation(sequences, k, scores[0], tuple(scores[1:]), decode)


def require_same_tokens(target: Target, sequences: Sequences) -> None:
    """Raises ConfigError if `target` is known to make other tokens of the texts."""
    if target.vocabulary is not None and sequences.highest >= target.vocabulary:
        raise ConfigError(
            f"{target.name}: has {target.vocabulary} tokens, and the samples hold token"
            f" {sequences.highest}: it is not of the reference's model"
        )
    for origin, text, ids in zip(sequences.origins, sequences.texts, sequences.ids, strict=True):
        own = None if text is None else target.encode(text)
        if own is not None and tuple(own[: len(ids)]) != ids:
            raise ConfigError(
                f"{target.name}: its tokenizer makes other tokens of {origin}: it is not of the"
                " reference's model"
            )


def _answers(
    target: Target,
    sequences: Sequences,
    k: int,
    out: Path | None,
    advance: Advance,
    note: Callable[[str], None],
) -> list[Answer]:
    # A checkpoint's identity requires reading all of it, and only stored answers need one.
    store = AnswerStore(out, target.name, target.identity if out is not None else {}, k)
    try:
        if store.changed is not None:
            note(
                f"{target.name} has changed since {out} was written ({store.changed}): its"
                " earlier answers stay there and are not used"
            )
        _say_of_samples(store, sequences, note)
        if not target.lasting:
            _say_of_answers(target, store, sequences, note)
        missing = {d: i for i, d in enumerate(sequences.digests) if store.get(d) is None}
        waiting = list(missing.values())
        total = sum(len(sequences.ids[index]) - 1 for index in waiting)
        done = 0
        advance(target.name, 0, total)
        answers = target.answers([sequences.ids[i] for i in waiting], k) if waiting else ()
        for position, answer in answers:
            index = waiting[position]
            if not answer.finite:
                raise NumericsError(f"{target.name}: NaN or Inf for {sequences.origins[index]}")
            store.add(sequences.digests[index], answer)
            done += len(answer.logprobs)
            advance(target.name, done, total)
        return [_known(store, digest) for digest in sequences.digests]
    finally:
        store.close()


def _say_of_samples(store: AnswerStore, sequences: Sequences, note: Callable[[str], Any]) -> None:
    before = store.samples(str(sequences.path), sequences.sha256)
    if before is not None:
        kept = sum(store.get(digest) is not None for digest in sequences.digests)
        note(
            f"{sequences.path} has changed since {store.name} answered it (SHA-256"
            f" {before[:8]}..., now {sequences.sha256[:8]}...): {kept} of {len(sequences.ids)}"
            " samples are unchanged, and only the others are sent"
        )


def _say_of_answers(
    target: Target, store: AnswerStore, sequences: Sequences, note: Callable[[str], None]
) -> None:
    """Sends one stored sample again if others are missing, to detect a changed model.

    Notes a mean change of more than `_SAME`.
    """
    kept = [index for index, d in enumerate(sequences.digests) if store.get(d) is not None]
    if not kept or len(kept) == len(sequences.ids):
        return
    index = kept[0]
    before = _known(store, sequences.digests[index])
    for _, answer in target.answers([sequences.ids[index]], store.k):
        moved = float(np.abs(answer.logprobs - before.logprobs).mean())
        if not moved <= _SAME:
            note(
                f"{target.name} answers {sequences.origins[index]} differently than before, by"
                f" {moved:.2g} nats a token: if it serves another model now, or computes in another"
                " way, do not mix its answers with the earlier ones: give another --out"
            )


def _known(store: AnswerStore, digest: str) -> Answer:
    answer = store.get(digest)
    assert answer is not None, "a target has answered every sample"
    return answer
