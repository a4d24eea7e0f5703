"""What the fuzzer puts into requests: values, bytes, header lines, framings, targets."""

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
LEGAL: dict[str, list[Any]] = {
    "max_tokens": [1, 3, 20, 64, None],
    "temperature": [0, 0.0, 1, 2.5, 1e-9],
    "top_p": [1, 0.01, 0.5],
    "top_k": [-1, 0, 1, 5, 10**6],
    "n": [1, 2, 3, None],
    "seed": [0, -1, 2**62],
    "stop": ["e", ["x", "é"], "\U0001f600", [], None],
    "stop_token_ids": [[], [101], [256, 0]],
    "ignore_eos": [True, False],
    "stream": [True, False, None],
    "user": ["me", "\u2028"],
    "metadata": [{"a": "b"}],
    "presence_penalty": [0, 0.0],
    "return_tokens_as_token_ids": [True],
    "prompt_cache_key": ["k"],
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

HEADERS: tuple[bytes, ...] = (
    *b"""\
X-Request-Timeout: 0
X-Request-Timeout: -1
X-Request-Timeout: nan
X-Request-Timeout: inf
X-Request-Timeout: 1e999
X-Request-Timeout: x
X-Request-Timeout:
X-Request-Timeout: 30
X-Octet-Tier:
X-Octet-Tier: exact
X-Octet-Tier: \xff\xfe
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

FRAMES = tuple(
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

TARGETS: tuple[bytes, ...] = (
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
METHODS = (
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
VERSIONS = (b"1.1", b"1.1", b"1.1", b"1.0", b"2.0", b"0.9", b"9.9", b"", b"1.1 ")
