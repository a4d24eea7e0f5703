"""Answers that are made to be expensive: each step is short, and so is what they may hold."""

import contextlib
import gc
import json
from collections.abc import Callable
from typing import Any, cast

import pytest

from octet.errors import BackendError, RequestError
from serve.api.operation import Call
from serve.api.relay import open_relay
from serve.backends.bounds import MAX_EVENT, MAX_EVENTS, PIECE
from tests.fakes import FakeRunner, fake_backend
from tests.serve.api.test_relay import COUNTED, DONE, Upstream, opened, relayed
from tests.serve.in_process import in_process
from tests.serve.longest_step import MOST_S, least_longest_step
from tests.serve.upstreams import Scripted

TOKEN = b'data: {"choices":[{"text":"a"}]}\n\n'
MEGABYTES = 4_000_000


def repeated(event: bytes, size: int = MEGABYTES) -> bytes:
    return event * (size // len(event))


def in_pieces(stream: bytes) -> list[bytes]:
    return [stream[i : i + PIECE] for i in range(0, len(stream), PIECE)]


# Streams of some megabytes that cost the most in some way.
STREAMS = {
    "comments": repeated(b":\n\n"),
    "comments after a token": TOKEN + repeated(b":\n\n"),
    "comments that are just long enough": TOKEN + repeated(b": " + b"x" * 13 + b"\n\n"),
    "blank lines": TOKEN + repeated(b"\n"),
    "usage in each event": repeated(b'data: {"choices":[],"usage":{}}\n\n'),
    "usage that is none": TOKEN + repeated(b'data: {"usage":1}\n\n'),
    "usage and CRLF": repeated(b'data: {"choices":[],"usage":{}}\r\n\r\n'),
    "one mixed blank line": TOKEN + repeated(b'data: {"usage":1}\n\n') + b":\r\n\r\n",
    "roles": repeated(b'data: {"choices":[{"delta":{"role":"a"}}]}\n\n'),
    "empty choices": repeated(b'data: {"choices":[]}\n\n'),
    "errors": TOKEN + repeated(b'data: {"error":{}}\n\n'),
    "no errors": TOKEN + repeated(b'data: {"choices":[],"a":"error","error":1}\n\n'),
    "not quite the end": TOKEN + repeated(b"data: [DONE] [DONE]\n\n"),
    "lines without end": TOKEN + repeated(b"data:\n"),
    "carriage returns": TOKEN + repeated(b"data: \r"),
    "spaces": TOKEN + b"data:" + repeated(b" "),
    "aborted": TOKEN + repeated(b'data: {"finish_reason": "stop","a":"abort"}\n\n'),
    "one event": b'data: {"choices":[{"text":"' + repeated(b"a") + b'"}]}\n\n' + DONE,
    "one event of lists": b'data: {"choices":[{"a":[' + repeated(b"[],") + b"0]}]}\n\n" + DONE,
    "one event of usage": b'data: {"choices":[' + repeated(b'{"usage":{}},') + b"0]}\n\n" + DONE,
    "one event of models": b'data: {"choices":[' + repeated(b'{"model":""},') + b"0]}\n\n" + DONE,
    "one event of braces": b'data: {"usage":{' + repeated(b"{}") + b"}}\n\n" + DONE,
    "one event that is an error": b'data: {"error":"' + repeated(b"a") + b'"}\n\n' + DONE,
    "deep": b"data: " + repeated(b'{"a":') + b"\n\n" + DONE,
    "too long an event": TOKEN + b"data: " + repeated(b"a", 2 * MAX_EVENT),
}


@pytest.mark.parametrize(
    ("options", "alias"),
    [({"stream": True}, "alias"), (COUNTED, "served")],
    ids=["hidden and renamed", "counted"],
)
@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
async def test_no_stream_takes_long_in_one_step(stream: bytes, options: dict, alias: str) -> None:
    pieces = in_pieces(stream)
    gc.collect()

    async def relay() -> None:
        with contextlib.suppress(BackendError, RequestError):
            await relayed(Upstream([*pieces, BackendError("it ended")]), alias, **options)

    assert await least_longest_step(relay) < MOST_S


WHOLE = {
    "text": b'{"choices":[{"text":"' + repeated(b"a", 32_000_000) + b'"}]}',
    "lists": b'{"a":[' + repeated(b"[],", 32_000_000) + b"0]}",
    "usage": b'{"a":[' + repeated(b'"usage":{},', 32_000_000) + b"0]}",
    "one usage": b'{"usage":{' + repeated(b"a", 32_000_000) + b"}}",
    "models": b'{"a":[' + repeated(b'"model":"served",', 32_000_000) + b"0]}",
    "aborts": b'{"a":[' + repeated(b'"finish_reason":"b","abort",', 32_000_000) + b"0]}",
}


@pytest.mark.parametrize("alias", ["served", "alias"])
@pytest.mark.parametrize("body", WHOLE.values(), ids=WHOLE)
async def test_no_whole_answer_takes_long_in_one_step(body: bytes, alias: str) -> None:
    async def relay() -> None:
        try:
            await opened(Upstream(in_pieces(body), kind="application/json"), alias)
        except RequestError as error:
            assert "more than 1024 fields" in str(error)

    assert await least_longest_step(relay) < MOST_S


LARGE = {
    "plain": b'{"model":"alias","prompt":"' + repeated(b"a", 16_000_000) + b'"}',
    "ambiguous": b'{"model":"alias","a":{"model":1},"prompt":"'
    + repeated(b"a", 16_000_000)
    + b'"}',
}


@pytest.mark.parametrize("raw", LARGE.values(), ids=LARGE)
async def test_no_large_body_is_renamed_in_a_long_step(raw: bytes) -> None:
    sent = Call("r", "/v1/completions", raw, json.loads(raw), None, cast(Any, None))

    async def relay() -> None:
        upstream = Upstream([b"{}"], kind="application/json")
        await open_relay(cast(Any, upstream), sent)
        assert b'"model":"served"' in upstream.body.replace(b" ", b"")

    assert await least_longest_step(relay) < MOST_S


SLOW_TEMPLATE = "{% for _ in range(500) %}{% for _ in range(500) %}{% endfor %}{% endfor %}hi"


@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions"])
async def test_no_chat_template_takes_long_in_one_step(path: str) -> None:
    body = {"model": "fake", "messages": [{"role": "user", "content": "x"}]}
    backend = fake_backend(template=SLOW_TEMPLATE)
    async with in_process(("fake", [backend])) as served:

        async def render() -> None:
            assert (await served.request(path, body)).status == 200

        assert await least_longest_step(render) < MOST_S


async def test_a_large_answer_is_counted_and_renamed_without_parsing_it() -> None:
    text = b'"text":"' + b"a" * 100_000 + b'\\"model\\":\\"served\\""'
    body = (
        b'{"model": "served","choices":[{' + text + b'}],"usage": '
        b'{"prompt_tokens": 7,"completion_tokens":9,"details":{"a":1}}}'
    )
    answer = await opened(Upstream(in_pieces(body), kind="application/json"), "alias")
    assert answer.first == body.replace(b'"model": "served"', b'"model":"alias"')
    assert (answer.tally.prompt_tokens, answer.tally.completion_tokens) == (7, 9)


async def test_a_large_event_is_counted_and_renamed_and_so_are_those_after_it() -> None:
    usage = b'"usage":{"prompt_tokens":7,"completion_tokens":%d}'
    large = b'data: {"model":"served","choices":[{"text":"' + b"a" * 100_000 + b'"}],'
    small = b'data: {"model":"served","choices":[{"text":"b"}],'
    stream = large + usage % 1 + b"}\n\n" + small + usage % 2 + b"}\n\n" + DONE
    pieces, tally = await relayed(Upstream(in_pieces(stream)), "alias")
    assert b"".join(pieces) == stream.replace(b'"served"', b'"alias"')
    assert (tally.prompt_tokens, tally.completion_tokens) == (7, 2)


async def test_a_large_event_may_be_an_error() -> None:
    large = b'data: {"error":{"message":"' + b"a" * 100_000 + b'"}}\n\n'
    with pytest.raises(BackendError, match="failed while answering"):
        await opened(Upstream([large, DONE]), **COUNTED)
    _, tally = await relayed(Upstream([TOKEN, large, DONE]))
    assert isinstance(tally.failed, BackendError)


async def test_too_many_events_at_once_are_refused() -> None:
    flood = b":\n\n" * (MAX_EVENTS + 1)
    with pytest.raises(BackendError, match="more than 2048 events at once"):
        await relayed(Upstream([TOKEN, flood, DONE]))


BODY = {"model": "fake", "prompt": "x"}


async def test_an_answer_over_the_limit_is_not_tried_again_nor_held_against_its_backend() -> None:
    large = b'{"choices":[{"text":"' + b"x" * 5000 + b'"}]}'
    backend = Scripted(large)
    limits = {"max_answer_bytes": 4096}
    async with in_process(("fake", [backend, Scripted(large)]), limits=limits) as served:
        for _ in range(8):
            status, answer = await served.post("/v1/completions", BODY)
            assert (status, answer["error"]["code"]) == (502, "answer_too_large")
            assert "limits.max_answer_bytes" in answer["error"]["message"]
        assert served.metric("octet_retries_total", pool="fake", reason="garbled") == 0
        (pool,) = served.gateway.pools.values()
        assert sum(member.backend.asked for member in pool.members) == 8
        assert all(member.breaker.state == "closed" for member in pool.members)


FAILED: dict[str, Callable[[], Scripted]] = {
    "over the limit": lambda: Scripted(b'{"choices":[{"text":"' + b"x" * 9000 + b'"}]}'),
    "no JSON": lambda: Scripted(b"x" * 2000),
    "an error": lambda: Scripted(BackendError("failed", kind="failed")),
    "a broken stream": lambda: Scripted([TOKEN, BackendError("failed", kind="lost")]),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("backend", FAILED.values(), ids=FAILED)
async def test_a_failed_request_is_freed_at_once(
    backend: Callable[[], Scripted], stream: bool
) -> None:
    limits = {"max_answer_bytes": 4096}
    async with in_process(("fake", [backend()]), limits=limits) as served:
        gc.collect()
        before = [found for found in gc.get_objects() if type(found) is Call]
        gc.disable()
        try:
            for _ in range(3):
                reply = await served.request("/v1/completions", BODY | {"stream": stream})
                assert b'"error"' in reply.body or json.loads(reply.body)
            calls = [found for found in gc.get_objects() if type(found) is Call]
            assert len(calls) <= len(before)
        finally:
            gc.enable()


@pytest.mark.parametrize("logprobs", [None, 1])
async def test_an_answer_made_of_tokens_is_limited_too(logprobs: int | None) -> None:
    body = {"model": "fake", "prompt": "abc", "max_tokens": 60, "ignore_eos": True}
    body |= {} if logprobs is None else {"logprobs": logprobs}
    for most, status in ((20, 502), (100_000, 200)):
        limits = {"max_answer_bytes": most}
        async with in_process(("fake", [fake_backend(FakeRunner())]), limits=limits) as served:
            reply = await served.request("/v1/completions", body)
            assert reply.status == status
            assert (b"answer_too_large" in reply.body) == (status == 502)
            assert len(await served.events("/v1/completions", body)) > 1
