"""Servers that are right on most prompts, and answers that are none."""

import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from octet.proof.declared import declared_paths
from octet.proof.judge import judge
from octet.proof.responses import Response
from octet.proof.verdict import Verdict
from octet.recipe import PRESETS
from tests.octet.proof.worlds import HALVED, HONEST, make_world

FAULT_RECORDS = 24
Spoil = Callable[[Response], Response]


def judged(seed: int, answers: list[Response], bound: float | None = None) -> Verdict:
    """By simulations; by a bound alone if there is one."""
    world = make_world(seed)
    known = None if bound else world.scenarios(seed, fault_records=FAULT_RECORDS)
    declared = declared_paths(known, PRESETS["fp8"], "e5m2")
    return judge(world.golden, known, declared, answers, looks=3, bound=bound)


def rubbish(response: Response) -> Response:
    """Sure of a token that is not among the reference's."""
    top = {token + 1000: -0.01 - 6 * (token > 0) - token for token in range(20)}
    return replace(response, tokens=(1000,) * 4, tops=(top,) * 4)


def spoiled(seed: int, spoil: Spoil, every: int, count: int = 48) -> list[Response]:
    answers = make_world(seed).server(HONEST, seed)[:count]
    return [spoil(x) if n % every == every - 1 else x for n, x in enumerate(answers)]


@pytest.mark.parametrize("count", [24, 48])
@pytest.mark.parametrize("every", [3, 8, 24])
def test_rubbish_in_a_part_of_the_answers_is_refused(every: int, count: int) -> None:
    for seed in range(3):
        found = judged(seed, spoiled(seed, rubbish, every, count))
        assert found.outcome == "worse", (seed, found.reason)
        assert found.cause is not None and found.cause.name == "partly_wrong"
        told = re.search(rf"except for at least (\d+) of {count} prompts, of 1 to 1 ", found.reason)
        assert told is not None, found.reason
        assert count // every * 0.6 < int(told[1]) <= count // every


def test_a_fault_in_a_part_of_the_answers_is_not_admitted() -> None:
    """Of a part that came from a broken replica."""
    for seed in range(5):
        broken = make_world(seed).server(HALVED, seed)
        for every in (2, 4, 8):
            found = judged(seed, spoiled(seed, lambda x, b=broken: b[x.record], every))
            assert found.outcome in ("worse", "inconclusive"), (seed, every)
            assert "off" in found.reason or "except for" in found.reason


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, 1000.0, 1e308, 0.01, 0.0, -math.inf, -9999.0]
)
@pytest.mark.parametrize("bound", [None, 1.0])
def test_what_is_no_probability_is_refused_and_named(value: float, bound: float | None) -> None:
    def spoil(response: Response) -> Response:
        tops = tuple(dict.fromkeys(top, value) for top in response.tops)
        return replace(response, tops=tops)

    for every in (1, 48):
        found = judged(0, spoiled(0, spoil, every), bound)
        assert found.outcome == "worse"
        assert found.cause is not None and found.cause.name == "no_distribution"
        assert f"the log-probabilities of {48 // every} of 48 answers are invalid" in found.reason
        found.as_json()


def test_prompts_of_impossible_likelihood_are_refused() -> None:
    answers = spoiled(0, lambda x: replace(x, prompt_logprobs=(None, math.nan)), 48)
    found = judged(0, answers)
    assert found.cause is not None and found.cause.name == "no_distribution"


@pytest.mark.parametrize("bound", [None, 1.0])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda x: replace(x, tops=({},) * 4),
        lambda x: replace(x, tops=(), tokens=()),
        lambda x: replace(x, tops=x.tops[:1], tokens=x.tokens[:1]),
    ],
    ids=["silent", "empty", "cut"],
)
def test_who_leaves_answers_out_is_not_proven_by_the_others(
    spoil: Spoil, bound: float | None
) -> None:
    assert judged(0, spoiled(0, spoil, 48), bound).outcome == "as_expected"
    found = judged(0, spoiled(0, spoil, 4), bound)
    assert found.outcome == "inconclusive"
    assert "answers end early or leave out log-probabilities" in found.reason


def test_records_that_there_are_not_are_not_judged() -> None:
    answers = spoiled(0, rubbish, 99)
    strange = [replace(answers[0], record=n) for n in (-1, 48, 10**9)]
    assert judged(0, answers + strange).as_json() == judged(0, answers).as_json()


def test_a_bound_is_exceeded_by_a_part_for_certain() -> None:
    """An eighth of rubbish: too scattered for an interval, but more than the whole may have."""
    found = judged(0, spoiled(0, rubbish, 8), 0.1)
    assert found.outcome == "worse" and found.measure.kl_low < 1
    few = judged(0, spoiled(0, rubbish, 99)[:7], 0.1)
    assert few.outcome == "inconclusive"


def test_prompts_that_no_fault_was_simulated_on_do_not_prove() -> None:
    found = judged(0, spoiled(0, rubbish, 99)[FAULT_RECORDS:])
    assert found.outcome == "inconclusive" and "do not yet exclude" in found.reason


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            range(42, 48),
            "; the longer prompts are far off: look for what depends on a prompt's len",
        ),
        (range(6), "; the shorter prompts are far off: look for what depends on a prompt's length"),
        (
            range(3, 48, 8),
            "; their lengths differ from the others' by no more than chance: compare",
        ),
    ],
    ids=["long", "short", "any"],
)
def test_a_length_is_named_only_where_lengths_differ(wrong: range, said: str) -> None:
    """And never a worker or a device, which no answer shows."""
    world = make_world(0)
    records = tuple(
        record.model_copy(update={"prompt_token_ids": (0,) * (n + 1)})
        for n, record in enumerate(world.golden.records)
    )
    golden = world.golden.model_copy(update={"records": records})
    known = world.scenarios(0, fault_records=FAULT_RECORDS)
    answers = [rubbish(x) if x.record in wrong else x for x in world.server(HONEST, 0)]
    declared = declared_paths(known, PRESETS["fp8"], "e5m2")
    found = judge(golden, known, declared, answers, looks=3)
    assert found.cause is not None and found.cause.name == "partly_wrong"
    assert said in found.reason
    assert "worker" not in found.reason and "device" not in found.reason
