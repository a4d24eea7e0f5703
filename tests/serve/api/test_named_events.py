"""Streams of named events, cut into pieces anyhow: what reaches the client, and what is counted."""

import json
from typing import Any

import pytest
from hypothesis import given, settings

from octet.errors import BackendError, RequestError
from serve.api.named_events import MESSAGES, RESPONSES, Names, deltas_in
from serve.api.operation import Answer, Call
from serve.api.relay import open_relay
from serve.backends.bounds import MAX_EVENTS, MAX_FIELDS, MAX_PREAMBLE, PARSED
from tests.serve.api.test_relay import CUTS, Upstream, cut


def event(name: str, **fields: Any) -> bytes:
    data = json.dumps({"type": name, **fields}, separators=(",", ":"))
    return f"event: {name}\ndata: {data}\n\n".encode()


USAGE = {"input_tokens": 3, "input_tokens_details": {"cached_tokens": 1}, "output_tokens": 2}
BEGUN = {"model": "served", "usage": None, "error": None, "tools": []}
ENDED = BEGUN | {"usage": USAGE}
OPENING = event("response.created", response=BEGUN) + event("response.in_progress", response=BEGUN)
DELTA = event("response.output_text.delta", delta='event: response.completed\n "model":"served"')
RESPONSE = OPENING + DELTA + DELTA + event("response.completed", response=ENDED)
STARTED = {"model": "served", "usage": {"input_tokens": 3, "cache_read_input_tokens": 4}}
START = event("message_start", message=STARTED) + event("content_block_start", index=0)
TEXT = event("content_block_delta", delta={"type": "text_delta", "text": "event: message_stop"})
END = event("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 2})
STOP = event("message_stop")
MESSAGE = START + TEXT + TEXT + event("ping") + END + STOP
STREAMS = {"responses": (RESPONSES, RESPONSE, 3), "messages": (MESSAGES, MESSAGE, 7)}


async def opened(names: Names, upstream: Upstream, alias: str = "served", **fields: Any) -> Answer:
    data = {"model": alias, "stream": True, **fields}
    raw, route, backend = json.dumps(data).encode(), None, upstream
    call = Call("r", "/v1/responses", raw, data, None, route, {}, True)  # type: ignore[arg-type]
    return await open_relay(backend, call, names)  # type: ignore[arg-type]


async def read(names: Names, *pieces: Any, **fields: Any) -> tuple[list[bytes], Answer]:
    answer = await opened(names, Upstream(list(pieces)), **fields)
    assert answer.rest is not None
    return [answer.first, *[piece async for piece in answer.rest]], answer


@settings(deadline=None)  # a busy machine is no failure
@given(CUTS)
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("which", STREAMS)
async def test_the_bytes_are_the_same_however_they_arrive(
    which: str, end: bytes, at: list[int]
) -> None:
    names, stream, prompt = STREAMS[which]
    stream = stream.replace(b"\n", end)
    pieces, answer = await read(names, *cut(stream, at))
    assert b"".join(pieces) == stream
    assert all(piece.endswith(end * 2) for piece in pieces)
    assert sum(map(deltas_in, pieces)) == 2
    assert (answer.tally.prompt_tokens, answer.tally.completion_tokens) == (prompt, 2)
    assert answer.tally.ended and answer.tally.failed is None


@pytest.mark.parametrize("which", STREAMS)
async def test_an_alias_stands_in_every_event_and_text_stays(which: str) -> None:
    names, stream, _ = STREAMS[which]
    pieces, _ = await read(names, stream, alias="b")
    assert b"".join(pieces) == stream.replace(b'"model":"served"', b'"model":"b"')


@pytest.mark.parametrize("which", STREAMS)
async def test_a_stream_without_its_last_event_is_broken(which: str) -> None:
    names, stream, _ = STREAMS[which]
    for missing in (stream[: stream.rindex(b"event: ")], stream[:-1]):
        answer = await opened(names, Upstream([missing]))
        assert answer.rest is not None
        with pytest.raises(BackendError, match=names.last[0]) as failed:
            _ = [piece async for piece in answer.rest]
        assert failed.value.kind == "garbled"


@pytest.mark.parametrize("which", STREAMS)
async def test_what_opens_a_stream_is_held_back_until_there_is_a_token(which: str) -> None:
    names, stream, _ = STREAMS[which]
    opening = {"responses": OPENING, "messages": START}[which]
    lost = BackendError("gone", kind="lost")
    with pytest.raises(BackendError, match="gone"):  # and another backend may be tried
        await opened(names, Upstream([opening, b": ping\n\n", lost]))
    pieces, _ = await read(names, opening, stream[len(opening) :])
    assert pieces[0].startswith(opening) and len(pieces[0]) > len(opening)


async def test_a_long_request_may_be_repeated_before_the_first_token() -> None:
    instructions = "x" * (MAX_PREAMBLE - 100)
    begun = BEGUN | {"instructions": instructions}
    opening = [event(f"response.{name}", response=begun) for name in ("created", "in_progress")]
    rest = DELTA + event("response.completed", response=ENDED | {"instructions": instructions})
    pieces, answer = await read(RESPONSES, *opening, rest, instructions=instructions)
    assert pieces[0].startswith(opening[0] + opening[1])
    assert (answer.tally.prompt_tokens, answer.tally.completion_tokens) == (3, 2)
    assert answer.tally.ended and answer.tally.events == 4
    with pytest.raises(BackendError, match="nothing but comments"):
        await read(RESPONSES, *opening, rest)  # a backend's own words


async def test_a_large_last_event_is_counted_and_cannot_be_made_cheaper() -> None:
    tool = {"parameters": {"usage": {"input_tokens": 0, "output_tokens": 0}}}
    for order in (("tools", "usage"), ("usage", "tools")):
        found = {"tools": [tool], "usage": USAGE}
        ended = {"model": "served"} | {name: found[name] for name in order}
        last = event("response.completed", response=ended | {"text": "x" * PARSED})
        pieces, answer = await read(RESPONSES, OPENING + DELTA, last, alias="b")
        assert (answer.tally.prompt_tokens, answer.tally.completion_tokens) == (3, 2)
        assert b'"model":"b"' in pieces[-1] and answer.tally.ended


ERRORS = {
    "responses": [
        (event("error", code="server_error", message="it broke", param=None), 5),
        (event("response.failed", response={"error": {"message": "it broke"}}), 5),
        (b'data: {"error":{"message":"it broke","code":400}}\n\n', 4),
    ],
    "messages": [
        (event("error", error={"type": "api_error", "message": "it broke"}), 5),
        (event("error", error={"type": "invalid_request_error", "message": "it broke"}), 4),
    ],
}


@pytest.mark.parametrize("which", STREAMS)
async def test_an_error_before_the_first_token_is_raised_and_one_after_it_sent(which: str) -> None:
    names = STREAMS[which][0]
    opening, token = {"responses": (OPENING, DELTA), "messages": (START, TEXT)}[which]
    for sent, hundreds in ERRORS[which]:
        with pytest.raises((BackendError, RequestError), match="it broke") as raised:
            await opened(names, Upstream([opening, sent]))
        assert isinstance(raised.value, RequestError if hundreds == 4 else BackendError)
        answer = await opened(names, Upstream([opening + token, sent]))
        assert answer.rest is not None
        pieces = []
        try:
            async for piece in answer.rest:
                pieces.append(piece)
        except BackendError:
            pass  # nothing more follows: the error is what the client is told
        assert pieces == [sent]
        assert "it broke" in str(answer.tally.failed)


async def test_an_aborted_message_is_lost_and_its_end_not_sent() -> None:
    aborted = event("message_delta", delta={"stop_reason": None}, usage={"output_tokens": 2})
    answer = await opened(MESSAGES, Upstream([START + TEXT, aborted + STOP]))
    assert answer.rest is not None
    pieces = []
    with pytest.raises(BackendError, match="aborted") as failed:
        async for piece in answer.rest:
            pieces.append(piece)
    assert failed.value.kind == "lost" and pieces == []
    whole = json.dumps({"type": "message", "content": [], "usage": {"input_tokens": 1}}).encode()
    for body in (whole, whole.replace(b"[]", b'["' + b"x" * PARSED + b'"]')):
        with pytest.raises(BackendError, match="aborted"):
            await opened(MESSAGES, Upstream([body], kind="application/json"))


@pytest.mark.parametrize("size", [0, PARSED])
async def test_what_a_request_has_repeated_is_not_held_against_the_backend(size: int) -> None:
    """A backend may repeat metadata and tools; a model writes a tool's input."""
    own = {"finish_reason": "abort", "x": "x" * size}
    answers = {
        "responses": (RESPONSES, {"object": "response", "metadata": own, "usage": USAGE}),
        "messages": (
            MESSAGES,
            {"content": [{"input": own}], "stop_reason": "tool_use", "usage": USAGE},
        ),
    }
    for names, whole in answers.values():
        body = json.dumps(whole).encode()
        answer = await opened(names, Upstream([body], kind="application/json"))
        assert answer.first == body and answer.tally.completion_tokens == 2
    tools = [{"usage": {}, "model": ""}] * (MAX_FIELDS + 1)
    last = event("response.completed", response=ENDED | {"tools": tools, "x": "x" * PARSED})
    answer = await opened(RESPONSES, Upstream([OPENING + DELTA, last]))
    assert answer.rest is not None
    with pytest.raises(RequestError, match="more than") as refused:
        _ = [piece async for piece in answer.rest]
    assert (refused.value.status, refused.value.code) == (502, "answer_too_large")


async def test_what_follows_the_last_event_is_not_sent() -> None:
    for after in ([b"data: [DONE]\n\n"], [DELTA, b"nonsense"]):
        pieces, _ = await read(RESPONSES, RESPONSE, *after)
        assert b"".join(pieces) == RESPONSE
    pieces, _ = await read(RESPONSES, RESPONSE + DELTA)
    assert b"".join(pieces) == RESPONSE


async def test_events_without_a_line_of_their_name_are_read_by_their_type() -> None:
    stream = b"".join(line + b"\n" for line in RESPONSE.split(b"\n") if line[:6] != b"event:")
    stream = stream.removesuffix(b"\n")
    pieces, answer = await read(RESPONSES, stream)
    assert b"".join(pieces) == stream and answer.tally.prompt_tokens == 3


@pytest.mark.parametrize(
    "sent",
    [
        b"data: {not json\n\n",
        b"event: x\ndata: 3\n\n",
        b"nonsense\n\n",
        b":\n\n" * (MAX_EVENTS + 1),
    ],
)
async def test_nonsense_is_garbled(sent: bytes) -> None:
    for names in (RESPONSES, MESSAGES):
        with pytest.raises(BackendError) as failed:
            await opened(names, Upstream([sent]))
        assert failed.value.kind == "garbled"
