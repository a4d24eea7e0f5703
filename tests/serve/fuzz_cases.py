"""Requests gone wrong, as raw bytes: one seeded generator, so that every case can be had again."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

ASK = {"temperature": 0, "max_tokens": 2}
MESSAGES = [{"role": "system", "content": "be short"}, {"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "logprobs": 1, "stop": ["x"], "stream": False} | ASK,
    "/v1/chat/completions": {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1} | ASK,
    "/v1/embeddings": {"input": ["hello", "you"], "dimensions": 4},
    "/tokenize": {"prompt": "hello", "add_special_tokens": True, "return_token_strs": True},
    "/detokenize": {"tokens": [104, 105]},
}
PATHS = (*BODIES, "/v1/models", "/v1/models/fake", "/health", "/ready", "/metrics", "/", "/docs")
FIELDS = (
    *("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature"),
    *("top_p", "top_k", "n", "seed", "stop", "stop_token_ids", "stream", "stream_options"),
    *("logprobs", "top_logprobs", "echo", "ignore_eos", "best_of", "suffix", "user", "tools"),
    *("tool_choice", "response_format", "logit_bias", "presence_penalty", "metadata", "input"),
    *("encoding_format", "tokens", "return_tokens_as_token_ids", "min_p", "functions", "zzz"),
    *("add_special_tokens", "return_token_strs", "prompt_cache_key", "priority", "__proto__"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 16, 17, 2**31, -(2**31), 2**53, 2**63, -(2**63) - 1),
    *(10**30, 10**400, 0.0, -0.0, 0.5, 1.5, 1e300, -1e300, 5e-324, "", "a", "5", "null", "\x00"),
    *("\u2028", "\ud800", "\udfff\ud800", "\U0001f600", "fake", "relayed", "é" * 300, "x" * 3000),
    *([], [[]], [None], [1, "a"], ["a"], [0, 1, 256, 257], [-1], [2**31], ["\ud800"], {}),
    *({"include_usage": True}, {"include_usage": 1}, {"type": "json_object"}, {"": {}}),
    *([{"role": "user"}], [{"role": 1, "content": "x"}], [{"role": "user", "content": None}]),
    [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}],
    [{"role": "tool", "content": "x", "tool_call_id": "1"}],
)
BYTES = (b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\x00", b"\\ud800", b"NaN", b"1e999")
BYTES += (b"Infinity", b"-", b",", b'"', b"{", b"]", b"\n", b"9" * 5000, b"[" * 300, b"/**/")


@dataclass(frozen=True, slots=True)
class Case:
    number: int
    kind: str
    sent: bytes
    whole: bool  # one well-formed request: it must be answered


def cases(seed: int, count: int) -> Iterator[Case]:
    """`count` cases; number i is the same for a seed, however many are asked for."""
    kinds = (*[_json] * 6, *[_bytes] * 3, *[_headers] * 4, *[_framing] * 4, *[_line] * 2, _garbage)
    for number in range(count):
        rng = random.Random(f"{seed}-{number}")
        make: Callable[[random.Random], tuple[bytes, bool]] = rng.choice(kinds)
        sent, whole = make(rng)
        yield Case(number, make.__name__.strip("_"), sent, whole)


def _json(rng: random.Random) -> tuple[bytes, bool]:
    path, body = _valid(rng)
    for _ in range(rng.choice([1, 1, 1, 1, 2, 3])):
        _operate(rng, body)
    text = json.dumps(body)
    if rng.random() < 0.1:  # a repeated key
        key, value = rng.choice(FIELDS), json.dumps(rng.choice(VALUES))
        text = f'{{"{key}": {value}, {text[1:]}'
    if rng.random() < 0.1:
        text = text.replace(": ", ":" + rng.choice(["\n\t ", "  ", ""]))
    return request(path, text.encode()), True


def _operate(rng: random.Random, body: dict[str, Any]) -> None:
    choice = rng.random()
    key = rng.choice([*body]) if body and choice < 0.6 else rng.choice(FIELDS)
    if choice < 0.15:
        body.pop(key, None)
    elif choice < 0.8:
        body[key] = rng.choice(VALUES)
    elif choice < 0.9:
        value: Any = rng.choice(VALUES)
        for _ in range(rng.choice([1, 2, 50, 255, 400, 900])):
            value = [value] if rng.random() < 0.5 else {"a": value}
        body[key] = value
    else:
        value = rng.choice(["a", 1, [], {}, "é", 1.5])
        body[key] = [value] * rng.choice([2, 65, 129, 5000, 50_000])


def _bytes(rng: random.Random) -> tuple[bytes, bool]:
    path, body = _valid(rng)
    raw = bytearray(json.dumps(body).encode())
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        at = rng.randrange(len(raw) + 1)
        match rng.randrange(5):
            case 0:
                raw[at:at] = rng.choice(BYTES)
            case 1:
                del raw[at : at + rng.randint(1, 9)]
            case 2:
                raw[at : at + 1] = bytes([rng.randrange(256)])
            case 3:
                del raw[at:]
            case _:
                raw[at:at] = raw[rng.randrange(at + 1) : at]
        if not raw:
            break
    if rng.random() < 0.02:
        raw[:] = rng.choice([b"[" * 200_000, b'{"a":' * 30_000, b" " * 300_000, b"1," * 90_000])
    return request(path, bytes(raw)), True


_HEADERS: tuple[bytes, ...] = (
    *b"""\
X-Request-Timeout: 0
X-Request-Timeout: -1
X-Request-Timeout: nan
X-Request-Timeout: inf
X-Request-Timeout: 1e999
X-Request-Timeout: x
X-Request-Timeout:
X-Request-Timeout: 30
X-Request-Id:
X-Request-Id: a b
X-Request-Id: \xff\xfe
X-Request-Id: ok-1
X-Session-Id: \xc3\x28
traceparent: 00-0-0-0
traceparent: 00-aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa-bbbbbbbbbbbbbbbb-01
Authorization:
Authorization: Bearer
Authorization: Bearer \xff
Authorization: Basic eDp5
Content-Type:
Content-Type: text/plain
Content-Type: application/JSON; charset=latin-1
Content-Encoding: gzip
Accept-Encoding: gzip
Expect: 100-continue
Expect: 200-ok
Connection: keep-alive, close
Upgrade: h2c
Range: bytes=0-
X-Forwarded-For: ::1
X-HTTP-Method-Override: DELETE
Host:
: empty
no colon
sp ace: 1
 folded: 1
tab\t: 1
nul\x00: 1
ok: nul\x00
""".splitlines(),
    b"Connection: upgrade\r\nUpgrade: websocket",
    b"Host: a\r\nHost: b",
    b"X-Request-Id: " + b"x" * 500,
    b"Authorization: Bearer " + b"k" * 9000,
    b"Content-Type: " + b"a/b;" * 99,
    b"Cookie: " + b"a=b; " * 4000,
    b"X: " + b"y" * 70_000,
)


def _headers(rng: random.Random) -> tuple[bytes, bool]:
    path, body = _valid(rng)
    extra = [rng.choice(_HEADERS) for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.05:
        extra += [b"X-%d: %d" % (i, i) for i in range(rng.choice([100, 1000, 9000]))]
    method = rng.choice([b"POST"] * 6 + [b"GET", b"PUT", b"DELETE", b"OPTIONS", b"HEAD", b"TRACE"])
    return request(path, json.dumps(body).encode(), extra, method), False


_FRAMES = tuple(
    tuple(line.split(b"|"))
    for line in b"""\
Content-Length: -1
Content-Length: +5
Content-Length: 0x10
Content-Length: 5, 5
Content-Length: 1e3
Content-Length:
Content-Length: 999999999999999999999999999999
Content-Length: 0
Content-Length: 1
Content-Length: 5
Content-Length: 16777217
Content-Length: 99999999
Content-Length: 5|Content-Length: 6
Content-Length: 5|Transfer-Encoding: chunked
Transfer-Encoding: chunked|Content-Length: 5
Transfer-Encoding: chunked|Transfer-Encoding: identity
Transfer-Encoding: identity
Transfer-Encoding: xchunked
Transfer-Encoding: chunked, gzip
Transfer-Encoding: gzip, chunked
Transfer-Encoding: \x0bchunked
Transfer-Encoding: chunked\x00
Transfer-Encoding: CHUNKED
Transfer-Encoding:
Transfer-Encoding : chunked
X-No-Length: 1
""".splitlines()
)


def _framing(rng: random.Random) -> tuple[bytes, bool]:
    """Bodies whose length is said wrongly, twice, or in bad chunks; requests behind requests."""
    path, content = _valid(rng)
    body = json.dumps(content).encode()
    if rng.random() < 0.5:
        frame = rng.choice(_FRAMES)
        head = _head(b"POST", path, (b"Content-Type: application/json", *frame))
        if any(b"chunked" in line.lower() for line in frame) and rng.random() < 0.7:
            body = _chunked(rng, body)
    else:
        frame = (b"Content-Type: application/json", b"Transfer-Encoding: chunked")
        head, body = _head(b"POST", path, frame), _chunked(rng, body)
    sent = head + body
    if rng.random() < 0.3:  # what hides behind it
        sent += rng.choice(
            [b"GET /admin HTTP/1.1\r\nHost: x\r\n\r\n", b"0\r\n\r\n", sent, b"\r\n" * 9]
        )
    if rng.random() < 0.2:
        sent = sent[: rng.randrange(1, len(sent))]
    return sent, False


def _chunked(rng: random.Random, body: bytes) -> bytes:
    pieces, at = [], 0
    while at < len(body):
        size = rng.choice([1, 2, 7, 50, 1000])
        piece, at = body[at : at + size], at + size
        length = rng.choice([b"%x"] * 30 + [b"%X ;x=y", b"0x%x", b"-%x", b" %x", b"%x\x00", b"f%x"])
        pieces.append(
            length % len(piece) + b"\r\n" + piece + rng.choice([b"\r\n"] * 60 + [b"\n", b""])
        )
    ends = [b"0\r\n\r\n"] * 8 + [
        b"0\r\nX: y\r\n\r\n",
        b"",
        b"0\r\n",
        b"ffffffffffffffff1\r\n",
        b"zz\r\n",
    ]
    return b"".join(pieces) + rng.choice(ends)


_TARGETS: tuple[bytes, ...] = (
    *(path.encode() for path in PATHS),
    *b"""\
/v1/completions/
//v1/completions
/v1/../v1/models
/v1/models/%ff%00
/v1/models/\xe2\x98\x83
/v1/models?x=\x00
/%2e%2e/%2e%2e/etc/passwd
/\xff\xfe
/;
/admin/reload
/status
/openapi.json
http://elsewhere/v1/models
example.com:80
*
""".splitlines(),
    b"",
    b"/" + b"a" * 9000,
    b"/?" + b"q=1&" * 900,
    b"/v1/models/" + b"%41" * 500,
)
_METHODS = (
    b"POST",
    b"GET",
    b"post",
    b"HEAD",
    b"PRI",
    b"CONNECT",
    b"BREW",
    b"",
    b"G\x00T",
    b"M" * 500,
)
_VERSIONS = (b"1.1", b"1.1", b"1.1", b"1.0", b"2.0", b"0.9", b"9.9", b"", b"1.1 ")


def _line(rng: random.Random) -> tuple[bytes, bool]:
    """Methods, paths and versions."""
    version = b"HTTP/" + rng.choice(_VERSIONS)
    line = b" ".join((rng.choice(_METHODS), rng.choice(_TARGETS), version))
    body = b"{}" if rng.random() < 0.5 else b""
    head = (b"Host: x", b"Content-Type: application/json", b"Content-Length: %d" % len(body))
    return line + b"\r\n" + b"\r\n".join(head) + b"\r\nConnection: close\r\n\r\n" + body, False


def _garbage(rng: random.Random) -> tuple[bytes, bool]:
    choices = (
        rng.randbytes(rng.randint(1, 400)),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(200),  # TLS
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + rng.randbytes(30),
        b"\r\n" * rng.randint(1, 500),
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * rng.randint(1, 200),  # and no end
        b"A" * rng.choice([10, 1000, 70_000, 140_000]),
        b"",
    )
    return rng.choice(choices), False


def _valid(rng: random.Random) -> tuple[str, dict[str, Any]]:
    path = rng.choice([*BODIES])
    model = rng.choice(["fake"] * 6 + ["relayed", "alias"])
    body = json.loads(json.dumps({"model": model} | BODIES[path]))
    if "max_tokens" in body and rng.random() < 0.3:
        body["stream"] = True
    return path, body


def request(
    path: str, body: bytes, extra: list[bytes] | None = None, method: bytes = b"POST"
) -> bytes:
    """A well-formed request but for what `extra` header lines make of it."""
    own = (b"Content-Type: application/json", b"Content-Length: %d" % len(body))
    return _head(method, path, (*own, *(extra or ()))) + body


def _head(method: bytes, path: str, lines: tuple[bytes, ...]) -> bytes:
    first = method + b" " + path.encode() + b" HTTP/1.1"
    return b"\r\n".join((first, b"Host: x", b"Connection: close", *lines)) + b"\r\n\r\n"
