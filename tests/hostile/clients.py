"""Lists raw requests of hostile clients."""

import json
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["CASES", "Case"]


@dataclass(frozen=True)
class Case:
    """Bytes of one connection. `pause_s` is waited for after each byte."""

    name: str
    sent: bytes
    pause_s: float = 0.0


PATHS = (
    *("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/detokenize"),
    *("/v1/responses", "/v1/messages", "/v1/messages/count_tokens"),
)
BODY = b'{"model":"sound","prompt":"x"}'
FIELDS = (b"Host: x", b"Content-Type: application/json", b"Connection: close")


def request(line: bytes, *fields: bytes, body: bytes = b"") -> bytes:
    return b"\r\n".join([line, *fields, b"", body])


def post(body: bytes, *fields: bytes, path: str = PATHS[0]) -> bytes:
    length = b"Content-Length: %d" % len(body)
    return request(b"POST " + path.encode() + b" HTTP/1.1", *FIELDS, length, *fields, body=body)


METHODS = (
    b"GET",
    b"HEAD",
    b"PUT",
    b"DELETE",
    b"OPTIONS",
    b"TRACE",
    b"PATCH",
    b"CONNECT",
    b"PRI",
    b"FOO",
    b"post",
    b"",
)
TARGETS = (
    *(
        b"/",
        b"/v1/completions",
        b"/v1/models/%2e%2e/%00",
        b"//evil/..",
        b"*",
        b"http://x/health",
        b"x:1",
    ),
    *(
        b"/" + b"a" * 60_000,
        b"/\xff",
        b"/health?" + b"a=b&" * 1000,
        b"/a b",
        b"/%",
        b"/admin/reload",
    ),
)
HEADERS = {
    "no host": (b"Host:",),
    "two hosts": (b"Host: a", b"Host: b"),
    "null": (b"A: \x00",),
    "control characters": (b"A: \x01\x1b[2J",),
    "not ASCII": (b"A: \xff\xfe",),
    "no colon": (b"nonsense",),
    "space before the colon": (b"A : b",),
    "folded": (b"A: b\r\n c",),
    "no name": (b": b",),
    "bare CR": (b"A: b\rX: y",),
    "bare LF": (b"A: b\nX: y",),
    "long": (b"A: " + b"x" * 70_000,),
    "many": (b"A: b",) * 15_000,
    "two keys": (b"Authorization: Bearer a", b"Authorization: Bearer b"),
    "no scheme": (b"Authorization: x",),
    "key of bytes": (b"Authorization: Bearer \xff",),
    "another type": (b"Content-Type: text/plain",),
    "type of bytes": (b"Content-Type: \xff",),
    "tier": (b"X-Octet-Tier: \xff",),
    "two tiers": (b"X-Octet-Tier: a", b"X-Octet-Tier: b"),
    "timeout": (b"X-Octet-Timeout: nan",),
    "negative timeout": (b"X-Octet-Timeout: -1",),
    "timeout of digits": (b"X-Octet-Timeout: " + b"9" * 5000,),
    "request id": (b"X-Request-Id: \x7f" + b"x" * 5000,),
    "traceparent": (b"Traceparent: 00-x-y-z", b"Tracestate: " + b"a" * 5000),
    "expect": (b"Expect: 100-continue",),
    "expect nonsense": (b"Expect: 200-ok",),
    "upgrade": (b"Upgrade: websocket", b"Connection: Upgrade"),
    "accept": (b"Accept: " + b"a/b;q=0," * 1000,),
    "forwarded": (b"X-Forwarded-For: 127.0.0.1", b"X-Forwarded-Proto: https", b"Forwarded: for=x"),
    "range": (b"Range: bytes=0-" + b"9" * 50,),
    "origin": (b"Origin: https://evil.example",),
    "cookie": (b"Cookie: " + b"a=b;" * 5000,),
}
LENGTHS = {
    "none": (),
    "negative": (b"Content-Length: -1",),
    "letters": (b"Content-Length: x",),
    "huge": (b"Content-Length: " + b"9" * 30,),
    "too large": (b"Content-Length: 99999999",),
    "plus": (b"Content-Length: +5",),
    "two": (b"Content-Length: 5", b"Content-Length: 6"),
    "list": (b"Content-Length: 5, 6",),
    "and chunks": (b"Content-Length: 5", b"Transfer-Encoding: chunked"),
    "two codings": (b"Transfer-Encoding: chunked, chunked",),
    "unknown coding": (b"Transfer-Encoding: gzip",),
    "odd coding": (b"Transfer-Encoding: xchunked",),
    "coding in space": (b"Transfer-Encoding : chunked",),
    "coding of tabs": (b"Transfer-Encoding:\tchunked",),
}
CHUNKS = {
    "nothing": b"0\r\n\r\n",
    "no size": b"x\r\n",
    "negative": b"-1\r\n",
    "huge": b"f" * 17 + b"\r\n",
    "too short": b"2\r\nabc\r\n0\r\n\r\n",
    "extension": b"1;" + b"a" * 70_000 + b"\r\n{\r\n0\r\n\r\n",
    "trailers": b"1\r\n{\r\n0\r\n" + b"a: b\r\n" * 20_000 + b"\r\n",
    "many": b"1\r\n \r\n" * 20_000 + b"0\r\n\r\n",
    "only LF": b"1\n{\n0\n\n",
    "smuggled": b"0\r\n\r\nGET /admin/reload HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
}
BODIES = {
    "nothing": b"",
    "null": b"null",
    "a list": b"[]",
    "a number": b"1e999",
    "half": BODY[:-1],
    "and more": BODY + b"x",
    "BOM": b"\xef\xbb\xbf" + BODY,
    "UTF-16": BODY.decode().encode("utf-16"),
    "not UTF-8": b'{"model":"\xff"}',
    "a lone surrogate": b'{"model":"sound","prompt":"\\ud800"}',
    "a null character": b'{"model":"sound\\u0000","prompt":"x"}',
    "NaN": b'{"model":"sound","prompt":"x","temperature":NaN}',
    "infinity": b'{"model":"sound","prompt":"x","logit_bias":{"1":1e999}}',
    "many digits": b'{"model":"sound","prompt":"x","seed":' + b"9" * 5000 + b"}",
    "deep": b'{"model":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "many keys": json.dumps({str(i): i for i in range(50_000)}).encode(),
    "a repeated key": b'{"model":"sound","model":"other","prompt":"x"}',
    "no model": b'{"prompt":"x"}',
    "a model of objects": b'{"model":{},"prompt":"x"}',
    "an unknown model": b'{"model":"' + b"x" * 100_000 + b'","prompt":"x"}',
    "a model of escapes": b'{"model":"\\u001b[2J\\r\\n","prompt":"x"}',
    "no prompt": b'{"model":"sound"}',
    "a prompt of nulls": b'{"model":"sound","prompt":[null]}',
    "mixed prompts": b'{"model":"sound","prompt":["a",1,[2]]}',
    "many prompts": json.dumps({"model": "sound", "prompt": ["a"] * 5000}).encode(),
    "negative ids": b'{"model":"sound","prompt":[-1]}',
    "large ids": b'{"model":"sound","prompt":[99999999999999999999]}',
    "many ids": json.dumps({"model": "sound", "prompt": list(range(200_000))}).encode(),
    "a long prompt": json.dumps({"model": "sound", "prompt": "x" * 1_500_000}).encode(),
    "n": b'{"model":"sound","prompt":"x","n":1000000}',
    "no n": b'{"model":"sound","prompt":"x","n":0}',
    "max_tokens": b'{"model":"sound","prompt":"x","max_tokens":1e9}',
    "negative max_tokens": b'{"model":"sound","prompt":"x","max_tokens":-1}',
    "logprobs": b'{"model":"sound","prompt":"x","logprobs":1000}',
    "stop": json.dumps({"model": "sound", "prompt": "x", "stop": ["a"] * 10_000}).encode(),
    "an empty stop": b'{"model":"sound","prompt":"x","stop":""}',
    "stream as text": b'{"model":"sound","prompt":"x","stream":"yes"}',
    "options without a stream": b'{"model":"sound","prompt":"x","stream_options":{}}',
    "messages of texts": b'{"model":"sound","messages":["a"]}',
    "no messages": b'{"model":"sound","messages":[]}',
    "many messages": json.dumps(
        {"model": "sound", "messages": [{"role": "user", "content": "x"}] * 20_000}
    ).encode(),
    "no role": b'{"model":"sound","messages":[{"content":"x"}]}',
    "many parts": json.dumps(
        {"model": "sound", "messages": [{"role": "u", "content": [{"type": "text"}] * 20_000}]}
    ).encode(),
    "too large": b" " * 2_500_000,
    "spaces": b" " * 1_000_000,
    "commas": b"[" + b"1," * 500_000 + b"1]",
    "brackets": b'{"model":"sound","prompt":[' + b"[]," * 300_000 + b"[]]}",
    "strings": b'{"model":"sound","prompt":[' + b'"",' * 300_000 + b'""]}',
    "escapes": b'{"model":"sound","prompt":"' + b"\\u0041" * 150_000 + b'"}',
    "braces in a name": b'{"model":"sound","prompt":"x","a":{"model":"b","\\u006dodel":1}}',
}

_SAID = [{"role": "user", "content": "x"}]
NAMED: dict[str, tuple[str, dict[str, object]]] = {  # path, and fields of a sound request
    "a limit of another protocol": (PATHS[5], {"max_completion_tokens": "x", "max_tokens": []}),
    "many items": (PATHS[5], {"input": [{"role": "user", "content": "x"}] * 20_000}),
    "items of nothing": (PATHS[5], {"input": [{}, {"content": [None, 1, []]}]}),
    "tools of nothing": (PATHS[5], {"tools": [{"parameters": {"a": [[[]]]}}] * 1000}),
    "metadata": (PATHS[5], {"metadata": {"finish_reason": "abort", "user_id": {}}}),
    "a system of bytes": (PATHS[6], {"system": [{"type": "image", "source": "x" * 100_000}]}),
    "another limit": (PATHS[6], {"max_completion_tokens": 1e9, "max_output_tokens": -1}),
    "odd parts": (PATHS[6], {"messages": [{"role": 3, "content": [{"type": []}, {"type": 1}]}]}),
    "a user of objects": (PATHS[6], {"metadata": {"user_id": [{}]}, "stream": True}),
    "counted parts": (PATHS[7], {"messages": [{"content": [{"type": "document"}] * 20_000}]}),
}


def cases() -> Iterator[Case]:
    for method in METHODS:
        for target in (b"/health", b"/v1/completions", b"/nothing"):
            yield Case(
                f"{method!r} {target!r}", request(method + b" " + target + b" HTTP/1.1", *FIELDS)
            )
    for target in TARGETS:
        for method in (b"GET", b"POST"):
            yield Case(
                f"{method!r} {target[:30]!r}",
                request(method + b" " + target + b" HTTP/1.1", *FIELDS),
            )
    for version in (b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/9.9", b"HTTP/1.1 x", b"", b"ICY"):
        yield Case(f"version {version!r}", request(b"GET /health " + version, *FIELDS))
    for name, fields in HEADERS.items():
        yield Case(f"header: {name}", post(BODY, *fields))
        yield Case(
            f"header of a GET: {name}", request(b"GET /v1/models HTTP/1.1", *FIELDS, *fields)
        )
    for name, fields in LENGTHS.items():
        yield Case(
            f"length: {name}",
            request(b"POST " + PATHS[0].encode() + b" HTTP/1.1", *FIELDS, *fields, body=BODY),
        )
    for name, body in CHUNKS.items():
        fields = (*FIELDS, b"Transfer-Encoding: chunked")
        yield Case(f"chunks: {name}", request(b"POST /v1/completions HTTP/1.1", *fields, body=body))
    for name, body in BODIES.items():
        for path in PATHS[:2]:
            yield Case(f"{path}: {name}", post(body, path=path))
    for path in PATHS[2:]:
        for name in ("nothing", "null", "deep", "many keys", "a lone surrogate", "commas", "half"):
            yield Case(f"{path}: {name}", post(BODIES[name], path=path))
    for name, (path, more) in NAMED.items():
        asked = {"model": "sound", "input": "x", "messages": _SAID, "max_tokens": 9} | more
        yield Case(f"{path}: {name}", post(json.dumps(asked).encode(), path=path))
    for name in ("two keys", "no scheme", "key of bytes", "another type", "two tiers"):
        keyed = (b"X-Api-Key: x", *HEADERS[name])
        yield Case(f"x-api-key, {name}", post(BODY, *keyed, path=PATHS[6]))
    sound = post(BODY)
    open_ = sound.replace(b"Connection: close\r\n", b"")
    yield Case("a byte at a time", sound, 0.001)
    yield Case("headers without end", b"GET /health HTTP/1.1\r\n" + b"A: b\r\n" * 5)
    yield Case("a body without end", post(BODY)[:-5])
    yield Case("pipelined", open_ * 20 + sound)
    yield Case("pipelined and garbage", open_ * 3 + b"\x00\x01")
    yield Case("many pipelined", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 3000)
    upgrade = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    yield Case("many pipelined upgrades", upgrade * 2000)
    yield Case("nothing", b"")
    yield Case("line ends", b"\r\n" * 1000 + sound)
    yield Case("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500))
    yield Case("SSH", b"SSH-2.0-OpenSSH\r\n")
    yield Case("a proxy's line", b"PROXY TCP4 1.1.1.1 2.2.2.2 1 2\r\n" + sound)
    yield Case("HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(100))
    yield Case("random", bytes((i * 7919) % 256 for i in range(5000)))


CASES = list(cases())
