"""Lists responses of a hostile upstream, and serves them.

The gateway forwards the client's `X-Request-Id`, which names the scenario to play.
"""

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from tests.serve.upstreams import chunk, whole

__all__ = ["REPORTS", "SCENARIOS", "Scenario", "Upstream", "playing"]

RESET, WAIT = "reset", "wait"  # breaks the connection off; sends nothing more
Step: TypeAlias = bytes | float | str  # bytes to send, seconds to pause, RESET or WAIT


@dataclass(frozen=True)
class Scenario:
    """Steps that answer a request for a whole answer or for a stream."""

    name: str
    steps: tuple[Step, ...]
    stream: bool = False
    counted: bool = False  # the client requests the usage, too
    path: str = "/v1/completions"


TOKEN = chunk("a")
DONE = b"data: [DONE]\n\n"
SOUND = TOKEN + chunk("b") + DONE
JSON = b"content-type: application/json"
EVENTS = b"content-type: text/event-stream"


def head(status: bytes, *fields: bytes) -> bytes:
    return b"\r\n".join([b"HTTP/1.1 " + status, *fields, b"", b""])


def sized(status: bytes, body: bytes, *fields: bytes) -> bytes:
    return head(status, b"content-length: %d" % len(body), b"connection: close", *fields) + body


def until_close(body: bytes, kind: bytes) -> bytes:
    return head(b"200 OK", b"connection: close", kind) + body


def chunked(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


STATUSES = [
    *(
        b"100",
        b"200",
        b"201",
        b"204",
        b"206",
        b"301",
        b"304",
        b"400",
        b"401",
        b"403",
        b"404",
        b"408",
    ),
    *(b"413", b"422", b"429", b"500", b"501", b"502", b"503", b"599", b"600", b"999"),
]
BODIES = {
    "nothing": b"",
    "text": b"<html>It works!</html>",
    "error": b'{"error":{"message":"m","type":"t","code":400}}',
    "odd error": b'{"error":{"message":{"a":[1]},"param":3,"code":{}}}',
    "answer": whole(),
    "binary": bytes(range(256)) * 8,
    "long": b'{"error":{"message":"' + b"x" * 100_000 + b'"}}',
}
WHOLE = {
    "no object": b"[1, 2]",
    "number": b"1",
    "half": whole()[:-5],
    "twice": whole() * 2,
    "deep": b"[" * 50_000 + b"]" * 50_000,
    "not UTF-8": whole("x").replace(b'"x"', b'"\xff\xfe"'),
    "null bytes": whole("x").replace(b'"x"', b'"\x00"'),
    "aborted": whole().replace(b'"stop"', b'"abort"'),
    "many digits": b'{"a":' + b"1" * 50_000 + b"}",
    "large": b'{"choices":[{"text":"' + b"x" * 500_000 + b'"}]}',
    "large and no JSON": b"x" * 500_000,
    "many fields": b'{"a":[' + b'{"usage":{}},' * 40_000 + b"0]}",
    "over the limit": b'{"choices":[{"text":"' + b"x" * 3_000_000 + b'"}]}',
    "surrogates": b'{"choices":[{"text":"\\ud800"}],"usage":{"prompt_tokens":1}}',
    "an error": b'{"error":"no"}',
    "an old error": b'{"object":"error","message":"no","code":40001}',
    "a lot of space": b" " * 100_000 + whole(),
}
STREAMS = {
    "nothing": b"",
    "only done": DONE,
    "no done": TOKEN,
    "half an event": TOKEN + TOKEN[:-9],
    "comments": b": ping\n\n" * 20 + SOUND,
    "endless comments": b":\n\n" * 100_000,
    "endless short events": TOKEN + b"data:{}\n\n" * 50_000,
    "blank lines": b"\n" * 100_000 + SOUND,
    "only a role": b'data: {"choices":[{"delta":{"role":"assistant"}}]}\n\n' + DONE,
    "no JSON": b"data: <html>\n\n" + DONE,
    "later no JSON": TOKEN + b"data: <html>\n\n" + DONE,
    "a list": b"data: [1]\n\n" + DONE,
    "error": b'data: {"error":{"message":"m","code":500}}\n\n' + DONE,
    "refusal": b'data: {"error":{"message":"m","code":400}}\n\n' + DONE,
    "odd code": b'data: {"error":{"message":"m","code":1e999}}\n\n' + DONE,
    "later error": TOKEN + b'data: {"error":{"message":"m"}}\n\n' + DONE,
    "error that ends": TOKEN + b'data: {"error":{"message":"m"}}\n\n',
    "text": b"hello\n\n" + DONE,
    "binary": TOKEN + bytes(range(256)) * 40 + b"\n\n" + DONE,
    "CRLF": SOUND.replace(b"\n", b"\r\n"),
    "CR": SOUND.replace(b"\n", b"\r"),
    "mixed": TOKEN + SOUND.replace(b"\n", b"\r\n") + TOKEN,
    "BOM": b"\xef\xbb\xbf" + SOUND,
    "after done": SOUND + TOKEN * 3,
    "two dones": SOUND + DONE,
    "script after done": SOUND + b"data: <script>alert(1)</script>\n\n",
    "done and more": TOKEN + b"data: [DONE] x\n\n" + DONE,
    "done in a text": chunk("data: [DONE]") + DONE,
    "names and ids": b"event: e\nid: 1\nretry: 5\n" + SOUND,
    "many lines": b"data: {\n" + b"data:\n" * 5000 + b'data: "choices":[{"text":"a"}]}\n\n' + DONE,
    "aborted": TOKEN + b'data: {"choices":[{"finish_reason":"abort"}]}\n\n' + DONE,
    "aborted at once": b'data: {"choices":[{"finish_reason":"abort"}]}\n\n' + DONE,
    "one large event": chunk("x" * 200_000) + DONE,
    "too large an event": b"data: " + b"x" * 9_000_000,
    "a large error": b'data: {"error":"' + b"x" * 200_000 + b'"}\n\n' + DONE,
    "deep": b"data: " + b"[" * 20_000 + b"\n\n" + DONE,
    "not UTF-8": b'data: {"choices":[{"text":"\xff"}]}\n\n' + DONE,
    "no choices": b'data: {"choices":3}\n\n' + DONE,
    "choices of nothing": b'data: {"choices":[null, 1, "a"]}\n\n' + DONE,
    "many tokens": TOKEN * 20_000 + DONE,
}


def event(name: str, **fields: Any) -> bytes:
    data = json.dumps({"type": name, **fields}, separators=(",", ":"))
    return f"event: {name}\ndata: {data}\n\n".encode()


RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
COUNTED = {"input_tokens": 3, "output_tokens": 1}
# By path: what comes before a token, a token, the end.
NAMED = {
    RESPONSES: (
        event("response.created", response={"model": "m", "usage": None}),
        event("response.output_text.delta", delta="a"),
        event("response.completed", response={"model": "m", "usage": COUNTED}),
    ),
    MESSAGES: (
        event("message_start", message={"model": "m", "usage": COUNTED}),
        event("content_block_delta", delta={"type": "text_delta", "text": "a"}),
        event("message_delta", delta={"stop_reason": "end_turn"}, usage=COUNTED)
        + event("message_stop"),
    ),
}


def named_streams(path: str) -> Iterator[tuple[str, bytes]]:
    start, token, end = NAMED[path]
    sound = start + token + end
    last = end.rpartition(b"event: ")[2]
    yield "sound", sound
    yield "CRLF", sound.replace(b"\n", b"\r\n")
    yield "no names", b"\n".join(x for x in sound.split(b"\n") if x[:6] != b"event:")
    yield "only names", b"event: response.completed\n\nevent: message_stop\n\n"
    yield "names without end", b"event: " + b"a" * 9_000_000
    yield "a name of bytes", start + b"event: \xff\xfe\ndata: {}\n\n" + token + end
    yield "two names", start + b"event: ping\n" + token + end
    yield "another name in its data", start + b"event: ping\ndata: {}\n\nevent: x\n" + last
    yield "only its beginning", start
    yield "endless beginnings", start * 100_000
    yield "a large beginning", event("message_start", message="x" * 7_000_000) * 4
    yield "no end", start + token
    yield "half an end", (start + token + end)[:-1]
    yield "the end at once", end
    yield "after the end", sound + token * 3 + b"nonsense"
    yield "an error", event("error", error={"type": "x", "message": "m"})
    yield "a later error", start + token + event("error", error={"type": [], "message": {}})
    yield "an error that is none", start + token + event("error", error=None)
    yield "a failure", start + token + event("response.failed", response=3)
    yield "a large failure", start + token + event("response.failed", response="x" * 200_000)
    yield "done", start + token + DONE
    yield "no reason", start + token + event("message_delta", delta={"stop_reason": None})
    yield "an odd delta", start + token + event("message_delta", delta=[1]) + end
    yield "many fields", start + token + event("x", a=[{"usage": {}, "model": "m"}] * 20_000)
    yield "a large end", start + token + event("response.completed", response="x" * 200_000)
    yield "deep", start + b"event: message_delta\ndata: " + b"[" * 20_000 + b"\n\n" + end
    for name, usage in USAGES.items():
        usage = usage.replace("prompt_", "input_").replace("completion_", "output_")
        yield f"usage: {name}", sound.replace(b'"usage":' + _COUNTED, b'"usage":' + usage.encode())
    for at in range(1, len(sound), 32):
        yield f"cut at byte {at}", sound[:at]


_COUNTED = json.dumps(COUNTED, separators=(",", ":")).encode()
USAGES = {
    "negative": '{"prompt_tokens":3,"completion_tokens":-1000000000000}',
    "huge": '{"prompt_tokens":3,"completion_tokens":1000000000000000000}',
    "400 digits": '{"prompt_tokens":3,"completion_tokens":%s}' % ("1" * 400),
    "9000 digits": '{"prompt_tokens":3,"completion_tokens":%s}' % ("1" * 9000),
    "fraction": '{"prompt_tokens":3.5,"completion_tokens":1}',
    "infinite": '{"prompt_tokens":1e999,"completion_tokens":NaN}',
    "text": '{"prompt_tokens":"3","completion_tokens":"x"}',
    "object": '{"prompt_tokens":{},"completion_tokens":[]}',
    "truth": '{"prompt_tokens":true,"completion_tokens":true}',
    "none": "null",
    "number": "7",
    "nothing": "{}",
    "nested": '{"prompt_tokens":1,"completion_tokens":1,"d":{"d":{"d":{}}}}',
}
FRAMINGS = {
    "no status line": lambda body: body,
    "HTTP/0.9": lambda body: b"HTTP/0.9 200 OK\r\n\r\n" + body,
    "HTTP/2": lambda body: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + body,
    "no digits": lambda body: sized(b"abc OK", body),
    "negative length": lambda body: head(b"200 OK", b"content-length: -1") + body,
    "length of letters": lambda body: head(b"200 OK", b"content-length: x") + body,
    "endless length": lambda body: head(b"200 OK", b"content-length: " + b"9" * 30) + body,
    "length too long": lambda body: head(b"200 OK", b"content-length: 99999") + body,
    "length too short": lambda body: head(b"200 OK", b"content-length: 5") + body,
    "two lengths": lambda body: (
        head(b"200 OK", b"content-length: 5", b"content-length: %d" % len(body)) + body
    ),
    "length and chunks": lambda body: (
        head(b"200 OK", b"content-length: 5", b"transfer-encoding: chunked") + chunked(body)
    ),
    "chunks without end": lambda body: (
        head(b"200 OK", b"transfer-encoding: chunked") + chunked(body)[:-5]
    ),
    "chunk of no size": lambda body: head(b"200 OK", b"transfer-encoding: chunked") + b"xyz\r\n",
    "negative chunk": lambda body: head(b"200 OK", b"transfer-encoding: chunked") + b"-5\r\nabcde",
    "huge chunk": lambda body: head(b"200 OK", b"transfer-encoding: chunked") + b"f" * 20 + b"\r\n",
    "chunk extension": lambda body: (
        head(b"200 OK", b"transfer-encoding: chunked") + b"1;%s\r\nx\r\n" % (b"a" * 100_000)
    ),
    "trailers": lambda body: (
        head(b"200 OK", b"transfer-encoding: chunked", JSON)
        + chunked(body)[:-2]
        + b"a: b\r\n" * 50_000
        + b"\r\n"
    ),
    "unknown coding": lambda body: head(b"200 OK", b"transfer-encoding: x") + body,
    "gzip that is none": lambda body: sized(b"200 OK", body, b"content-encoding: gzip", JSON),
    "a long header": lambda body: sized(b"200 OK", body, b"a: " + b"x" * 100_000),
    "many headers": lambda body: sized(b"200 OK", body, *[b"a: b"] * 20_000),
    "a folded header": lambda body: sized(b"200 OK", body, b"a: b\r\n c", JSON),
    "a header without colon": lambda body: sized(b"200 OK", body, b"nonsense"),
    "a header of bytes": lambda body: sized(b"200 OK", body, b"a: \xff\x01", JSON),
    "a null in a header": lambda body: sized(b"200 OK", body, b"a: \x00"),
    "only LF": lambda body: sized(b"200 OK", body, JSON).replace(b"\r\n", b"\n"),
    "many 1xx": lambda body: (
        head(b"103 Early Hints", b"a: b") * 2000 + sized(b"200 OK", body, JSON)
    ),
    "an upgrade": lambda body: head(b"101 Go", b"upgrade: h2c", b"connection: upgrade") + body,
    "a redirect": lambda body: head(b"302 Found", b"location: http://127.0.0.1:1/") + body,
    "cookies": lambda body: sized(b"200 OK", body, *[b"set-cookie: a=b"] * 20, JSON),
    "two answers": lambda body: sized(b"200 OK", body, JSON) * 2,
    "no kind": lambda body: sized(b"200 OK", body),
    "a page": lambda body: sized(b"200 OK", body, b"content-type: text/html"),
    "an odd kind": lambda body: sized(b"200 OK", body, b"content-type: \xe9\xff"),
}
RETRY_AFTER = (
    b"",
    b"0",
    b"-1",
    b"soon",
    b"\xff\xfe",
    b"\xd9\xa3",
    b"9" * 400,
    b"1e9",
    b"Fri, 31 Dec 9999 23:59:59 GMT",
)


def pauses(body: bytes, kind: bytes) -> Iterator[tuple[str, tuple[Step, ...]]]:
    beginning = head(b"200 OK", b"connection: close", kind)
    yield "waits", (WAIT,)
    yield "waits after its status", (beginning[:17], WAIT)
    yield "waits after its headers", (beginning, WAIT)
    yield "waits in the middle", (beginning + body[: len(body) // 2], WAIT)
    yield "waits after its end", (beginning + body, WAIT)
    yield "resets", (RESET,)
    yield "resets after its headers", (beginning, 0.02, RESET)
    yield "resets in the middle", (beginning + body[: len(body) // 2], 0.02, RESET)
    yield "resets after its end", (beginning + body, 0.02, RESET)
    yield (
        "a byte at a time",
        (beginning, *(s for b in body[:80] for s in (bytes([b]), 0.001)), body[80:]),
    )
    yield "headers a byte at a time", (*(bytes([b]) for b in beginning), body)


def scenarios() -> Iterator[Scenario]:
    for status in STATUSES:
        for name, body in BODIES.items():
            for stream in (False, True):
                yield Scenario(
                    f"status {status.decode()}, {name}",
                    (sized(status + b" X", body, JSON),),
                    stream,
                )
    for name, body in WHOLE.items():
        yield Scenario(f"whole: {name}", (sized(b"200 OK", body, JSON),))
        yield Scenario(
            f"whole, chunked: {name}",
            (head(b"200 OK", b"transfer-encoding: chunked", JSON) + chunked(body),),
        )
    for name, body in STREAMS.items():
        for counted in (False, True):
            yield Scenario(f"stream: {name}", (until_close(body, EVENTS),), True, counted)
        yield Scenario(
            f"stream, chunked: {name}",
            (head(b"200 OK", b"transfer-encoding: chunked", EVENTS) + chunked(body),),
            True,
        )
    for name, usage in USAGES.items():
        answer = b'{"choices":[{"text":"a"}],"usage":%s}' % usage.encode()
        yield Scenario(f"usage: {name}", (sized(b"200 OK", answer, JSON),))
        last = b'data: {"choices":[],"usage":%s}\n\n' % usage.encode()
        each = TOKEN[:-3] + b',"usage":%s}\n\n' % usage.encode()
        for counted in (False, True):
            yield Scenario(
                f"usage at the end: {name}",
                (until_close(TOKEN + last + DONE, EVENTS),),
                True,
                counted,
            )
            yield Scenario(
                f"usage in each: {name}", (until_close(each * 3 + DONE, EVENTS),), True, counted
            )
    for path in NAMED:
        for name, body in named_streams(path):
            what = f"{path}: {name}"
            yield Scenario(what, (until_close(body, EVENTS),), True, path=path)
        for name, body in (WHOLE | BODIES).items():
            what = f"{path}, whole: {name}"
            yield Scenario(what, (sized(b"200 OK", body, JSON),), path=path)
        for status in STATUSES:
            steps = (sized(status + b" X", BODIES["odd error"], JSON),)
            yield Scenario(f"{path}, status {status.decode()}", steps, path=path)
    for name, framed in FRAMINGS.items():
        yield Scenario(f"framing: {name}", (framed(whole()),))
        yield Scenario(f"framing of a stream: {name}", (framed(SOUND).replace(JSON, EVENTS),), True)
    for value in RETRY_AFTER:
        for status in (b"429 X", b"503 X", b"400 X"):
            yield Scenario(
                f"retry after {value[:20]!r}",
                (sized(status, BODIES["error"], b"retry-after: " + value),),
            )
    for name, steps in pauses(whole(), JSON):
        yield Scenario(f"pace: {name}", steps)
    for name, steps in pauses(SOUND, EVENTS):
        yield Scenario(f"pace of a stream: {name}", steps, True)
    stream, answer = until_close(SOUND, EVENTS), sized(b"200 OK", whole(), JSON)
    for cut in range(1, len(stream), 8):
        yield Scenario(f"cut at byte {cut}", (stream[:cut],), True)
    for cut in range(1, len(answer), 8):
        yield Scenario(f"cut at byte {cut}", (answer[:cut],))


def numbered() -> dict[str, Scenario]:
    """Gives each scenario an id that a header can carry."""
    return {f"s{number}": scenario for number, scenario in enumerate(scenarios())}


SCENARIOS = numbered()

PAGE = b"vllm:num_requests_running 3\n"
MODELS = json.dumps({"data": [{"id": "m", "max_model_len": 4096}]}).encode()
# What it answers to GET requests: /health, /metrics, /v1/models, /load.
REPORTS: dict[str, bytes] = {
    "sound": sized(b"200 OK", MODELS),
    "nothing": b"",
    "404": sized(b"404 X", b""),
    "500": sized(b"500 X", b"x" * 100_000),
    "999": sized(b"999 X", b""),
    "too long": until_close(PAGE * 1_000_000, b"a: b"),
    "too long a length": head(b"200 OK", b"content-length: 99999999999") + PAGE * 100_000,
    "no HTTP": b"SSH-2.0-x\r\n\r\n",
    "binary": sized(b"200 OK", bytes(range(256)) * 1000),
    "huge numbers": sized(
        b"200 OK", b"vllm:num_requests_running 1e308\nvllm:kv_cache_usage_perc NaN\n"
    ),
    "negative": sized(b"200 OK", b"vllm:num_requests_running -5\nvllm:num_requests_waiting -1e9\n"),
    "labels": sized(b"200 OK", b'vllm:num_requests_running{a="' + b'\\"' * 100_000 + b'"} 1\n'),
    "many lines": sized(b"200 OK", PAGE * 30_000),
    "deep": sized(b"200 OK", b"[" * 500_000),
    "digits": sized(b"200 OK", b'{"data":[{"id":"m","max_model_len":' + b"9" * 10_000 + b"}]}"),
    "a negative context": sized(b"200 OK", b'{"data":[{"id":"m","max_model_len":-7}]}'),
    "no list": sized(b"200 OK", b'{"data":{"id":"m"}}'),
    "a load": sized(b"200 OK", b'{"server_load":-999999999999999999999}'),
    "a redirect": head(b"302 X", b"location: /", b"content-length: 0"),
    "many headers": sized(b"200 OK", MODELS, *[b"a: b"] * 20_000),
}


class Upstream:
    """Answers POSTs by scenario, and GETs by `report`; counts what runs."""

    def __init__(self) -> None:
        self.url = ""
        self.scenarios: dict[str, Scenario] = dict(SCENARIOS)
        self.report = REPORTS["sound"]
        self.posts = self.gets = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while request := await reader.readuntil(b"\r\n\r\n"):
                if not request.startswith(b"POST"):
                    self.gets += 1
                    writer.write(self.report)
                    await writer.drain()
                    return
                self.posts += 1
                fields = dict(line.lower().split(b": ", 1) for line in request.split(b"\r\n")[1:-2])
                await reader.readexactly(int(fields[b"content-length"]))
                scenario = self.scenarios.get(fields.get(b"x-request-id", b"").decode())
                await self._play(scenario, writer)
                return
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the gateway closed it
        finally:
            writer.close()

    async def _play(self, scenario: Scenario | None, writer: asyncio.StreamWriter) -> None:
        for step in (sized(b"200 OK", whole(), JSON),) if scenario is None else scenario.steps:
            if isinstance(step, float):
                await asyncio.sleep(step)
            elif step == WAIT:
                await asyncio.sleep(3600)
            elif step == RESET:
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, linger
                )
                writer.transport.abort()
                return
            else:
                assert isinstance(step, bytes)
                writer.write(step)
                await writer.drain()


@asynccontextmanager
async def playing() -> AsyncIterator[Upstream]:
    """A hostile upstream on a loopback socket."""
    upstream = Upstream()
    tasks: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        with suppress(asyncio.CancelledError):  # at the end of the test
            await upstream.handle(reader, writer)

    server = await asyncio.start_server(connected, "127.0.0.1", 0, backlog=1024)
    upstream.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield upstream
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
