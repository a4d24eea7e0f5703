"""The tokens with the largest divergence, and their text."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from octet.proof.top_k import TopK
from verify.evaluation.comparison import compare
from verify.evaluation.scores import Evaluation, Scores
from verify.evaluation.sequences import Sequences
from verify.evaluation.worst import CONTEXT, COUNT

WORDS = {1: "▁the", 2: "▁cat", 3: "▁sat", 4: "x" * 1000}


def decode(ids: Sequence[int]) -> str:
    """As SentencePiece: a text has no space at its start."""
    return "".join(WORDS.get(i, f"▁{i}") for i in ids).replace("▁", " ").removeprefix(" ")


def scores(name: str, kl: Sequence[Sequence[float]] | None, logprob: float = -1.0) -> Scores:
    sizes = [len(values) for values in kl] if kl else [3, 40]
    tops = tuple(TopK(np.full((n, 1), 2), np.full((n, 1), -0.25)) for n in sizes)
    arrays = None if kl is None else tuple(map(np.array, kl))
    return Scores(name, tuple(np.full(n, -logprob) for n in sizes), arrays, tops)


def evaluation(reference: Scores | None, *targets: Scores) -> Evaluation:
    ids = ((1, 2, 3, 1), (*range(10, 50), 4))
    origins = ("s.jsonl, line 1", "s.jsonl, line 2")
    sequences = Sequences(Path("s.jsonl"), "", 64, origins, ("", ""), ids, ("", ""))
    return Evaluation(sequences, 20, reference, targets, decode)


def test_the_worst_come_first_within_their_text() -> None:
    kl = [[0.0, 0.5, 0.0], [0.0] * 38 + [0.25, 0.75]]
    (row,) = compare(
        evaluation(scores("origin", [[0.0] * 3, [0.0] * 40]), scores("q", kl, -2))
    ).rows
    long, short, middle = row.worst  # what does not differ is not among them
    assert [one.kl for one in row.worst] == [0.75, 0.5, 0.25]
    assert (short.before, short.token, short.position) == ("the cat", " sat", 2)
    assert (short.origin, short.token_id) == ("s.jsonl, line 1", 3)
    assert (short.logprob, short.reference_logprob) == (-2.0, -1.0)
    assert (short.likeliest.token, short.likeliest.logprob) == (" cat", -0.25)
    assert middle.before == "…" + " ".join(map(str, range(49 - CONTEXT, 49)))
    assert (middle.token, long.origin) == (" 49", "s.jsonl, line 2")
    assert len(long.token) < 300  # however long the token is


def test_few_are_kept() -> None:
    generator = np.random.default_rng(0)
    kl = [generator.random(3).tolist(), generator.random(40).tolist()]
    origin = scores("origin", [[0.0] * 3, [0.0] * 40])
    result = compare(evaluation(origin, scores("q", kl)))
    found = [one.kl for one in result.rows[0].worst]
    assert found == sorted([*kl[0], *kl[1]], reverse=True)[:COUNT]
    worst = json.loads(json.dumps(result.as_json()))["rows"][0]["worst"]
    assert len(worst) == COUNT and worst[0]["kl"] == found[0]


def test_without_a_reference_the_first_is_what_others_lose_to() -> None:
    first, second = compare(evaluation(None, scores("a", None), scores("b", None, -3.0))).rows
    assert first.worst == () and len(second.worst) == COUNT
    one = second.worst[0]
    assert one.kl is None and one.reference_logprob - one.logprob == pytest.approx(2.0)
    assert math.isfinite(one.likeliest.logprob)
