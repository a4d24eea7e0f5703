"""A lost or cut request is seen as one; needs no Docker engine."""

import pytest

from tests.compose.clients import Request, receive
from tests.compose.costs import HEAD, Cost

TOKEN = b'data: {"choices": [{"text": "x"}]}'
EMPTY = b'data: {"choices": [{"text": ""}]}'
ERROR = b'data: {"error": {"message": "its host is gone"}}'
DONE = b"data: [DONE]"


def answered(*lines: bytes, error: str | None = None) -> Request:
    request = Request()
    for line in lines:
        receive(request, line)
    request.error = request.error or error
    return request


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (answered(TOKEN, EMPTY, DONE), (1, 0, 0, 0)),
        (answered(TOKEN, ERROR), (0, 1, 0, 0)),
        (answered(TOKEN, error="ServerDisconnectedError"), (0, 1, 1, 0)),
        (answered(ERROR), (0, 0, 0, 1)),
        (answered(EMPTY, error="TimeoutError"), (0, 0, 1, 1)),
    ],
    ids=["complete", "broken", "cut after a token", "lost", "cut without a token"],
)
def test_a_request_counts_as_what_it_was(
    request_: Request, expected: tuple[int, int, int, int]
) -> None:
    cost = Cost("by hand", [request_], 1.0)
    found = (cost.complete, cost.broken, len(cost.unexplained), len(cost.lost))
    assert found == expected
    assert len(cost.row()) == len(HEAD)
