"""Relayed streams, cut into pieces anyhow: whole events go out, and the same bytes in the end."""

import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octet.errors import BackendError, BackendUnavailable
from serve.api.relay import open_relay
from serve.backends.base import Relay

STREAM = (
    b'data: {"model":"served","choices":[{"text":"a"}]}\n\n'
    b": ping\n\n"
    b'data: {"model": "served","choices":[{"text":"\\"model\\":\\"served\\" data: [DONE]"}]}\n\n'
    b'data: {"model":"served","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n'
    b"data: [DONE]\n\n"
)


class Upstream:
    """A backend whose answer is these pieces."""

    def __init__(self, pieces: list[bytes], served_name: str = "served") -> None:
        self.pieces = pieces
        self.served_name = served_name
        self.closed = False

    async def relay(self, _path: str, _body: bytes, _headers: Any) -> Relay:
        return Relay(200, {"content-type": "text/event-stream"}, self._body())

    async def _body(self) -> AsyncIterator[bytes]:
        try:
            for piece in self.pieces:
                yield piece
        finally:
            self.closed = True


async def relayed(upstream: Upstream, alias: str = "served") -> tuple[list[bytes], Any]:
    answer = await open_relay(upstream, "/v1/completions", b"{}", {"model": alias}, request_id="r")
    assert answer.rest is not None
    return [answer.first, *[piece async for piece in answer.rest]], answer.tally


def cut(stream: bytes, at: list[int]) -> list[bytes]:
    edges = [0, *sorted({i % (len(stream) + 1) for i in at}), len(stream)]
    return [stream[a:b] for a, b in itertools.pairwise(edges) if a < b]


CUTS = st.lists(st.integers(0, 10_000), max_size=12)


@given(CUTS)
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
async def test_the_bytes_are_the_same_however_they_arrive(end: bytes, at: list[int]) -> None:
    stream = STREAM.replace(b"\n", end)
    upstream = Upstream(cut(stream, at))
    pieces, tally = await relayed(upstream)
    assert b"".join(pieces) == stream
    assert all(piece.endswith(end * 2) for piece in pieces)
    assert (tally.prompt_tokens, tally.completion_tokens) == (3, 2)
    assert upstream.closed


@given(CUTS)
async def test_an_alias_is_written_however_they_arrive(at: list[int]) -> None:
    pieces, _ = await relayed(Upstream(cut(STREAM, at)), alias='a"b')
    expected = STREAM.replace(b'"model":"served"', b'"model":"a\\"b"')
    assert b"".join(pieces) == expected.replace(b'"model": "served"', b'"model":"a\\"b"')
    assert b'\\"model\\":\\"served\\"' in b"".join(pieces)  # the text of an answer stays


@pytest.mark.parametrize("length", [0, 10])
async def test_nothing_whole_is_a_failure_before_the_first_byte(length: int) -> None:
    with pytest.raises(BackendUnavailable, match="DONE"):
        await relayed(Upstream([STREAM[:length]] if length else []))


async def test_an_end_without_done_is_a_failure() -> None:
    events = STREAM.split(b"data: [DONE]\n")[0]
    with pytest.raises(BackendError, match="ended without"):
        await relayed(Upstream([events]))


async def test_a_last_event_without_its_blank_line_is_passed_on() -> None:
    pieces, _ = await relayed(Upstream([STREAM[:-2]]))
    assert b"".join(pieces) == STREAM[:-2]


async def test_closing_the_answer_closes_the_upstream() -> None:
    upstream = Upstream([STREAM[:60], STREAM[60:]])
    answer = await open_relay(
        upstream, "/v1/completions", b"{}", {"model": "served"}, request_id="r"
    )
    assert answer.rest is not None and not upstream.closed
    await answer.rest.aclose()
    assert upstream.closed
