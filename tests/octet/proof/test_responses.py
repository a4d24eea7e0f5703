"""How far an answer can be compared."""

import pytest

from octet.golden import GoldenRecord, Top
from octet.proof.responses import Response, agreement, comparable

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
