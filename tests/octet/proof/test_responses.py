"""Tests how far an answer can be compared."""

import math

import pytest

from octet.artifacts.golden import GoldenRecord, Top
from octet.proof.responses import Response, agreement, comparable, complete, improper

TOP = Top(token_ids=(1, 2), logprobs=(-0.1, -3.0))
RECORD = GoldenRecord(
    prompt="a", prompt_token_ids=(5,), continuation_token_ids=(1, 2, 1, 2), tops=(TOP,) * 3
)
TOLD = {1: -0.1}


@pytest.mark.parametrize(
    ("tokens", "tops", "agree", "positions"),
    [
        ((1, 2, 1, 2), (TOLD,) * 4, 4, [0, 1, 2]),  # as many as the record keeps
        ((1, 9, 1, 2), (TOLD,) * 4, 1, [0, 1]),  # the first other token's own position still is
        ((9, 2, 1, 2), (TOLD,) * 4, 0, [0]),
        ((-1, 2, 1, 2), (TOLD,) * 4, 0, [0]),  # an unknown token may be any
        ((1, 2), (TOLD,) * 2, 2, [0, 1]),  # it ended early
        ((1, 2, 1), (TOLD, {}, TOLD), 3, [0, 2]),  # nothing told of one position
        ((1, 2, 1), ({}, {}, {}), 3, []),
        ((), (), 0, []),
    ],
)
def test_it_ends_with_the_first_token_that_differs(tokens, tops, agree, positions) -> None:
    response = Response(0, tokens, tops)
    assert agreement(RECORD, response) == agree
    assert comparable(RECORD, response) == positions


@pytest.mark.parametrize(
    ("tokens", "tops", "whole"),
    [
        ((1, 2, 1), (TOLD,) * 3, True),
        ((1, 9), (TOLD,) * 2, True),  # what follows another token is not asked for
        ((9,), (TOLD,), True),
        ((1, 2), (TOLD,) * 2, True),  # the record's third may be the end, which is not told
        ((1,), (TOLD,), False),
        ((1, 9), (TOLD, {}), False),
        ((), (), False),
    ],
)
def test_an_answer_is_complete_up_to_the_first_other_token(tokens, tops, whole: bool) -> None:
    assert complete(RECORD, Response(0, tokens, tops)) == whole


@pytest.mark.parametrize(
    ("top", "wrong"),
    [
        ({1: -0.1, 2: -3.0}, None),
        ({1: 0.0}, None),
        ({1: 0.0005}, None),  # of rounding
        ({1: 0.0, 2: -9999.0, 3: -math.inf}, None),  # as servers write a probability of 0
        ({}, None),
        ({1: math.nan, 2: -1.0}, "NaN"),
        ({1: math.inf, 2: -1.0}, "infinite"),
        ({1: 0.002}, "above 0"),
        ({1: -0.1, 2: -0.2}, "their probabilities sum to more than 1"),
        ({1: -math.inf}, "-9999 or less for every token"),
        ({1: -9999.0, 2: -9999.0}, "-9999 or less for every token"),
        ({1: 1e308}, "above 0"),
    ],
)
def test_what_cannot_be_a_distribution(top, wrong: str | None) -> None:
    response = Response(0, (1, 2, 1), (TOLD, top))
    found = improper(response)
    assert found is None if wrong is None else found is not None and found.startswith(wrong)
    assert comparable(RECORD, response) == ([0] if wrong or not top else [0, 1])


def test_log_probabilities_of_the_prompt_are_looked_at_too() -> None:
    assert not improper(Response(0, (), (), (None, -1.0)))
    assert improper(Response(0, (), (), (None, math.nan)))
