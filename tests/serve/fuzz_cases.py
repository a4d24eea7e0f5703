"""Requests gone wrong, as raw bytes: one seeded generator, so that every case can be had again."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.serve.fuzz_tables import (
    BODIES,
    BYTES,
    FIELDS,
    FRAMES,
    HEADERS,
    LEGAL,
    METHODS,
    TARGETS,
    VALUES,
    VERSIONS,
)


@dataclass(frozen=True, slots=True)
class Case:
    number: int
    kind: str
    sent: bytes
    whole: bool  # one well-formed request: it must be answered


def cases(seed: int, count: int) -> Iterator[Case]:
    """`count` cases; number i is the same for a seed, however many are asked for."""
    kinds = (
        *[_json] * 5,
        *[_legal] * 4,
        *[_bytes] * 3,
        *[_headers] * 4,
        *[_framing] * 4,
        *[_line] * 2,
        _garbage,
    )
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


def _legal(rng: random.Random) -> tuple[bytes, bool]:
    """Most of these are answered: what goes wrong then, goes wrong deeper inside."""
    path, body = _valid(rng)
    for key in rng.sample(sorted(LEGAL), rng.randint(1, 5)):
        if "max_tokens" in body:
            body[key] = rng.choice(LEGAL[key])
    return request(path, json.dumps(body).encode()), True


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


def _headers(rng: random.Random) -> tuple[bytes, bool]:
    path, body = _valid(rng)
    extra = [rng.choice(HEADERS) for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.05:
        extra += [b"X-%d: %d" % (i, i) for i in range(rng.choice([100, 1000, 9000]))]
    method = rng.choice([b"POST"] * 6 + [b"GET", b"PUT", b"DELETE", b"OPTIONS", b"HEAD", b"TRACE"])
    return request(path, json.dumps(body).encode(), extra, method), False


def _framing(rng: random.Random) -> tuple[bytes, bool]:
    """Bodies whose length is said wrongly, twice, or in bad chunks; requests behind requests."""
    path, content = _valid(rng)
    body = json.dumps(content).encode()
    if rng.random() < 0.5:
        frame = rng.choice(FRAMES)
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


def _line(rng: random.Random) -> tuple[bytes, bool]:
    """Methods, paths and versions."""
    version = b"HTTP/" + rng.choice(VERSIONS)
    line = b" ".join((rng.choice(METHODS), rng.choice(TARGETS), version))
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
