"""Relayed streams, cut into pieces anyhow: whole events go out, and the same bytes in the end."""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octet.errors import BackendError, RequestError, UnsupportedField
from serve.api.operation import Answer, Call
from serve.api.relay import AnsweredFailure, open_relay
from serve.backends.base import Relay
from serve.backends.bounds import PIECE

USAGE = b'{"prompt_tokens":3,"completion_tokens":2}'
FIRST = (
    b'data: {"model":"served","choices":[{"text":"a"}]}\n\n'
    b": ping\n\n"
    b'data: {"model": "served","choices":[{"text":"\\"model\\":\\"served\\" data: [DONE]"}]}\n\n'
    b'data: {"model":"served","choices":[{"text":"\\"usage\\":{} \\"error\\""}]}\n\n'
)
COUNT = b'data: {"model":"served","choices":[],"usage":' + USAGE + b"}\n\n"
DONE = b"data: [DONE]\n\n"
STREAM = FIRST + COUNT + DONE
WHOLE = b'{"model":"served","choices":[{"text":"a"}],"usage":' + USAGE + b"}"
COUNTED = {"stream": True, "stream_options": {"include_usage": True}}


class Upstream:
    """A backend whose answer is these pieces."""

    name = "vllm http://10.0.0.1:8000"

    def __init__(
        self,
        pieces: list[Any],
        served_name: str = "served",
        *,
        status: int = 200,
        kind: str = "text/event-stream",
    ) -> None:
        self.pieces = pieces
        self.served_name = served_name
        self.status = status
        self.kind = kind
        self.closed = False
        self.body = b""

    async def relay(self, _path: str, body: bytes, _headers: Any) -> Relay:
        self.body = body
        return Relay(self.status, {"content-type": self.kind}, self._body())

    async def _body(self) -> AsyncIterator[bytes]:
        try:
            for piece in self.pieces:
                if isinstance(piece, Exception):
                    raise piece
                if len(piece) == PIECE:  # as openai_http.py does
                    await asyncio.sleep(0)
                yield piece
        finally:
            self.closed = True


def call(alias: str = "served", **fields: Any) -> Call:
    data = {"model": alias, **fields}
    route: Any = None
    raw, streamed = json.dumps(data).encode(), bool(data.get("stream"))
    return Call("r", "/v1/completions", raw, data, None, route, {}, streamed)


async def opened(upstream: Upstream, alias: str = "served", **fields: Any) -> Answer:
    backend: Any = upstream
    return await open_relay(backend, call(alias, **fields))


async def relayed(upstream: Upstream, alias: str = "served", **fields: Any) -> tuple[Any, Any]:
    answer = await opened(upstream, alias, **(fields or COUNTED))
    assert answer.rest is not None
    return [answer.first, *[piece async for piece in answer.rest]], answer.tally


def cut(stream: bytes, at: list[int]) -> list[bytes]:
    edges = [0, *sorted({i % (len(stream) + 1) for i in at}), len(stream)]
    return [stream[a:b] for a, b in itertools.pairwise(edges) if a < b]


CUTS = st.lists(st.integers(0, 10_000), max_size=12)


@settings(deadline=None)  # a busy machine is no failure
@given(CUTS)
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
async def test_the_bytes_are_the_same_however_they_arrive(end: bytes, at: list[int]) -> None:
    stream = STREAM.replace(b"\n", end)
    upstream = Upstream(cut(stream, at))
    pieces, tally = await relayed(upstream)
    assert b"".join(pieces) == stream
    assert all(piece.endswith(end * 2) for piece in pieces)
    assert (tally.prompt_tokens, tally.completion_tokens) == (3, 2)
    assert tally.failed is None and upstream.closed


@settings(deadline=None)  # a busy machine is no failure
@given(CUTS)
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
async def test_usage_that_the_client_did_not_ask_for_is_read_and_taken_out(
    end: bytes, at: list[int]
) -> None:
    upstream = Upstream(cut(STREAM.replace(b"\n", end), at))
    pieces, tally = await relayed(upstream, stream=True)
    assert json.loads(upstream.body)["stream_options"] == {"include_usage": True}
    assert b"".join(pieces) == (FIRST + DONE).replace(b"\n", end)
    assert (tally.prompt_tokens, tally.completion_tokens) == (3, 2)


async def test_a_null_usage_in_each_event_is_taken_out_too() -> None:
    events = FIRST.replace(b'"choices":[{', b'"usage": null,"choices":[{')
    pieces, tally = await relayed(Upstream([events, COUNT, DONE]), stream=True)
    assert b"".join(pieces) == FIRST + DONE and tally.completion_tokens == 2
    pieces, _ = await relayed(Upstream([events, COUNT, DONE]))
    assert b"".join(pieces) == events + COUNT + DONE  # the client asked for it


@settings(deadline=None)  # a busy machine is no failure
@given(CUTS)
async def test_an_alias_is_written_however_they_arrive(at: list[int]) -> None:
    pieces, _ = await relayed(Upstream(cut(STREAM, at)), alias='a"b')
    expected = STREAM.replace(b'"model":"served"', b'"model":"a\\"b"')
    assert b"".join(pieces) == expected.replace(b'"model": "served"', b'"model":"a\\"b"')
    assert b'\\"model\\":\\"served\\"' in b"".join(pieces)  # the text of an answer stays


@pytest.mark.parametrize("ascii_only", [True, False])
async def test_a_name_beyond_ascii_is_replaced_however_it_is_written(ascii_only: bool) -> None:
    body = json.dumps({"model": "modèle", "choices": []}, ensure_ascii=ascii_only).encode()
    answer = await opened(Upstream([body], "modèle", kind="application/json"), alias="b")
    assert json.loads(answer.first) == {"model": "b", "choices": []}


async def test_a_last_event_without_its_blank_line_is_passed_on() -> None:
    pieces, _ = await relayed(Upstream([STREAM[:-2]]))
    assert b"".join(pieces) == STREAM[:-2]


async def test_a_long_event_in_small_pieces_takes_time_in_proportion() -> None:
    """Looked through from its beginning with every piece, 4 MB take a hundred times as long."""
    event = b'data: {"choices":[{"text":"' + b"x" * (4 << 20) + b'"}]}\n\n'
    pieces = [event[i : i + 128] for i in range(0, len(event), 128)]
    started = time.process_time()
    found, _ = await relayed(Upstream([*pieces, DONE]))
    assert b"".join(found) == event + DONE
    assert time.process_time() - started < 5  # 0.05 s, or 27 s, on an EPYC


async def test_an_event_without_an_end_is_not_kept_for_ever() -> None:
    pieces = [b"data: " + b"x" * (1 << 20)] * 9
    upstream = Upstream([FIRST, *pieces])
    with pytest.raises(BackendError, match="an event of more than") as failed:
        await relayed(upstream)
    assert failed.value.kind == "garbled" and upstream.closed


GARBAGE = {
    "binary": [b"\x00\xff\x1f\x8b" * 50 + b"\n\n"],
    "html": [b"<html>\n\n</html>\n\n"],
    "no JSON": [b"data: {half\n\n"],
    "no object": [b"data: 17\n\n"],
    "nested": [b"data: " + b"[" * 20_000 + b"]" * 20_000 + b"\n\n"],
    "comments": [b": ping\n\n"] * 3,
}


@pytest.mark.parametrize("pieces", GARBAGE.values(), ids=GARBAGE)
async def test_garbage_instead_of_events_is_a_failure_of_the_backend(pieces: list[bytes]) -> None:
    upstream = Upstream(pieces)
    with pytest.raises(BackendError) as failed:
        await opened(upstream, **COUNTED)
    assert failed.value.kind == "garbled" and upstream.closed


async def test_a_first_event_that_blames_the_request_is_the_requests_error() -> None:
    error = b'data: {"error":{"message":"too long","code":400,"param":"prompt"}}\n\n'
    with pytest.raises(RequestError, match="too long") as refused:
        await opened(Upstream([error, DONE]), stream=True)
    assert (refused.value.status, refused.value.param) == (400, "prompt")


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
async def test_an_event_goes_out_as_soon_as_it_is_whole(end: bytes) -> None:
    event = FIRST.split(b"\n\n")[0] + end * 2
    for at in range(1, len(event)):
        nothing_more = BackendError("waited for more")
        answer = await opened(Upstream([event[:at], event[at:], nothing_more]), **COUNTED)
        assert answer.first == event and answer.rest is not None
        await answer.rest.aclose()


@pytest.mark.parametrize("count", [b"Infinity", b"[" * 20_000 + b"]" * 20_000, b"null"])
async def test_usage_that_is_no_count_is_passed_on_and_not_counted(count: bytes) -> None:
    usage = b'"usage":{"prompt_tokens":' + count + b',"completion_tokens":2}}'
    whole = b'{"choices":[{"text":"a"}],' + usage
    if b"[[" not in count:  # as a whole answer it is no JSON
        answer = await opened(Upstream([whole], kind="application/json"))
        assert answer.first == whole and answer.tally.prompt_tokens is None
    told = b'data: {"choices":[],' + usage + b"\n\n"
    pieces, tally = await relayed(Upstream([FIRST, told, DONE]))
    assert b"".join(pieces) == FIRST + told + DONE and tally.prompt_tokens is None


TOLD = COUNT[:-2]  # the usage, with room for other fields of its event


@pytest.mark.parametrize(
    "count", [b"id: 3\n" + COUNT, b"event: e\n" + COUNT, TOLD + b"\nid: 3\n\n"]
)
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
async def test_usage_is_found_among_the_other_fields_of_its_event(end: bytes, count: bytes) -> None:
    stream = [piece.replace(b"\n", end) for piece in (FIRST, count, DONE)]
    pieces, tally = await relayed(Upstream(stream), stream=True)
    assert b"".join(pieces) == stream[0] + stream[2]
    assert (tally.prompt_tokens, tally.completion_tokens) == (3, 2)


ENDS = (b"data:[DONE]\n\n", b"data:  [DONE]\n\n", b"data: [DONE]\nid: 9\n\n")


@pytest.mark.parametrize("end", ENDS)
async def test_done_may_be_written_in_other_ways(end: bytes) -> None:
    pieces, _ = await relayed(Upstream([FIRST, end, BackendError("it goes on")]))
    assert b"".join(pieces) == FIRST + end


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("more", [b": ping\n\n", DONE, FIRST, b"data: <script>\n\n", b"HTTP/1.1"])
async def test_nothing_after_done_reaches_the_client(more: bytes, line_end: bytes) -> None:
    stream = [piece.replace(b"\n", line_end) for piece in (FIRST + DONE, more)]
    for pieces in ([b"".join(stream)], stream, [stream[0][:-1], stream[0][-1:] + stream[1]]):
        found, tally = await relayed(Upstream(pieces))
        assert b"".join(found) == stream[0] and tally.ended


async def test_a_whole_answer_is_counted_whatever_its_size() -> None:
    large = WHOLE.replace(b'"a"', b'"' + b"x" * 100_000 + b'"')
    for body in (WHOLE, large):
        answer = await opened(Upstream([body[:20], body[20:]], kind="application/json"), alias="b")
        assert answer.first == body.replace(b"served", b"b")
        assert (answer.tally.prompt_tokens, answer.tally.completion_tokens) == (3, 2)
        for broken in (body[:-10], b"<html>" + body):
            with pytest.raises(BackendError, match="no JSON"):
                await opened(Upstream([broken], kind="application/json"))


async def test_a_failure_in_words_keeps_them() -> None:
    body = b'{"error":{"message":"queue full"}}'
    with pytest.raises(AnsweredFailure) as failed:
        await opened(Upstream([body], status=503, kind="application/json"))
    assert (failed.value.kind, failed.value.answer.status) == ("overloaded", 503)
    assert failed.value.answer.first == body
    answer = await opened(Upstream([body], status=422, kind="application/json"))
    assert (answer.status, answer.first, answer.rest) == (422, body, None)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"detail":[{"loc":["body","n"],"msg":"too many"}]}', "too many"),
        (b'{"object":"error","message":"too long","code":400}', "too long"),
        (b'{"error":"no such thing"}', "no such thing"),
        (b"", "answered 422"),
    ],
)
async def test_a_refusal_in_other_words_becomes_an_error_object(body: bytes, said: str) -> None:
    answer = await opened(Upstream([body], status=422, kind="application/json"))
    assert answer.status == 422 and said in json.loads(answer.first)["error"]["message"]
    with pytest.raises(UnsupportedField, match="does not have /v1/") as refused:
        await opened(Upstream([body], status=404, kind="application/json"))
    assert refused.value.status == 404
