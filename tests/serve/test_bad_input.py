"""Bad input, from the socket to the metric: a stated status, an error object, and a count."""

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.fakes import FakeRunner, fake_backend
from tests.serve.conftest import Served, serving
from tests.serve.http.raw_site import Client

KEY, OTHER = "sk-all", "sk-other"
ASK = {"model": "fake", "prompt": "hi", "max_tokens": 2}
COMPLETIONS = "/v1/completions"


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


@pytest.fixture(scope="module")
def keys() -> dict[str, Any]:
    expired = {"name": "old", "sha256": digest("sk-old"), "expires": "2020-01-01T00:00:00Z"}
    return {
        "keys": [
            {"name": "all", "sha256": digest(KEY)},
            {"name": "other", "sha256": digest(OTHER), "models": ["elsewhere"]},
            expired,
        ]
    }


@pytest.fixture
async def guarded(keys: dict[str, Any]) -> AsyncIterator[Served]:
    """Two models, three keys, and a model that never answers."""
    stuck = FakeRunner()
    stuck.gate.clear()
    pools = (
        ("fake", [fake_backend()]),
        ("elsewhere", [fake_backend()]),
        ("stuck", [fake_backend(stuck)]),
    )
    async with serving(*pools, access=keys) as served:
        yield served
        stuck.gate.set()


@dataclass
class Bad:
    """A request, and what it is answered: `code` is also the label of its metric."""

    status: int
    code: str
    says: str = ""
    body: Any = field(default_factory=lambda: dict(ASK))
    path: str = COMPLETIONS
    method: str = "POST"
    key: str | None = KEY
    headers: tuple[str, ...] = ()
    endpoint: str | None = None  # the metric's, where it is not the path
    retry_after: bool = False


LONG = [7] * 1_000_000
CASES = {
    "no key": Bad(401, "invalid_api_key", key=None),
    "no key for the models": Bad(
        401, "invalid_api_key", key=None, method="GET", path="/v1/models", body=b""
    ),
    "an unknown key": Bad(401, "invalid_api_key", key="sk-guessed"),
    "an expired key": Bad(401, "invalid_api_key", key="sk-old"),
    "a key without rights": Bad(403, "model_not_allowed", "'other' may not use", key=OTHER),
    "an expired deadline": Bad(
        504,
        "deadline_exceeded",
        "s waiting for stuck-1",
        body=ASK | {"model": "stuck"},
        headers=("X-Request-Timeout: 0.1",),
    ),
    "a deadline that is none": Bad(
        400, "invalid_timeout", "X-Request-Timeout", headers=("X-Request-Timeout: soon",)
    ),
    "an oversized header": Bad(
        431, "headers_too_large", "65536", headers=("X: " + "y" * 70_000,), endpoint="none"
    ),
    "invalid UTF-8": Bad(
        400, "invalid_utf8", "byte 0xff", body=b'{"model": "fake", "prompt": "\xff"}'
    ),
    "a lone surrogate": Bad(400, "invalid_unicode", "'prompt'", body=ASK | {"prompt": "\ud800"}),
    "no JSON": Bad(400, "*", "not valid JSON", body=b"{"),
    "another type": Bad(400, "unsupported_media_type", headers=("Content-Type: text/plain",)),
    "a million token ids": Bad(
        400, "context_length_exceeded", "1000000 tokens", body=ASK | {"prompt": LONG}
    ),
    "a million tokens of text": Bad(
        400,
        "context_length_exceeded",
        "4000000 characters",
        body=ASK | {"prompt": "word" * 1_000_000},
    ),
    "a million tokens of chat": Bad(
        400,
        "context_length_exceeded",
        "characters",
        path="/v1/chat/completions",
        body={"model": "fake", "messages": [{"role": "user", "content": "word" * 1_000_000}]},
    ),
    "more than a body may have": Bad(413, "request_too_large", "16777216", body=b" " * (2**24 + 1)),
    "more values than that": Bad(
        413, "request_too_large", "values", body=b'{"a": [' + b"[]," * 300_000 + b"0]}"
    ),
    "an unknown model": Bad(
        404, "model_not_found", "did you mean 'fake'", body=ASK | {"model": "fke"}
    ),
    "an unknown path": Bad(404, "not_found", path="/v1/nothing", endpoint="other"),
    "a wrong method": Bad(405, "method_not_allowed", "GET", method="GET", body=b""),
    "no HTTP": Bad(400, "malformed_http", headers=("no colon",), endpoint="none"),
    "two lengths": Bad(400, "malformed_http", headers=("Content-Length: 7",), endpoint="none"),
    "both framings": Bad(
        400, "malformed_http", headers=("Transfer-Encoding: chunked",), endpoint="none"
    ),
}


def raw_request(bad: Bad) -> bytes:
    body = bad.body if isinstance(bad.body, bytes) else json.dumps(bad.body).encode()
    lines = [f"{bad.method} {bad.path} HTTP/1.1", "Host: x", "Connection: close"]
    lines += [f"Content-Length: {len(body)}", *bad.headers]
    if not any(line.lower().startswith("content-type") for line in bad.headers):
        lines.append("Content-Type: application/json")
    if bad.key is not None:
        lines.append(f"Authorization: Bearer {bad.key}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def answer_to(served: Served, raw: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the one answer to these bytes."""
    host, port = served.url.removeprefix("http://").split(":")
    client = Client(*await asyncio.open_connection(host, int(port)))
    client.writer.write(raw)
    try:
        answer = await client.answer()
        with contextlib.suppress(ConnectionResetError):  # by a server that reads no more of `raw`
            assert await client.ends() == b""
        return answer
    finally:
        client.writer.close()


async def test_each_has_its_status_its_error_object_and_its_metric(guarded: Served) -> None:
    for what, bad in CASES.items():
        code = "invalid_request" if bad.code == "*" else bad.code
        labels = {"endpoint": bad.endpoint or bad.path, "code": code}
        before = await guarded.metric("octet_errors_total", **labels)
        status, headers, body = await answer_to(guarded, raw_request(bad))
        error = json.loads(body)["error"]
        assert status == bad.status, (what, error)
        assert error.keys() == {"message", "type", "param", "code"}, what
        assert error["code"] == (None if bad.code == "*" else bad.code), (what, error)
        assert bad.says in error["message"] and "\n" not in error["message"], (what, error)
        assert "127.0.0.1" not in error["message"], what
        assert ("x-request-id" in headers) == (bad.endpoint != "none"), what
        assert await guarded.metric("octet_errors_total", **labels) == before + 1, (what, labels)
    status, answer = await _asked(guarded)
    assert status == 200, answer


async def _asked(served: Served) -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {KEY}"}
    async with served.session.post(COMPLETIONS, json=ASK, headers=headers) as response:
        return response.status, await response.json()


async def test_health_is_answered_while_large_bodies_arrive() -> None:
    """Four bodies of 16 MB at once."""
    sent = raw_request(Bad(400, "", body=ASK | {"prompt": [12345] * (2**24 // 7 - 99)}))
    answered = 0
    async with serving(("fake", [fake_backend()])) as served:
        bodies = asyncio.gather(*(answer_to(served, sent) for _ in range(4)))
        while not bodies.done():
            async with served.session.get("/health") as response:
                assert response.status == 200
            answered += 1
        assert [status for status, _, _ in await bodies] == [400] * 4
    assert answered > 20, "it waited for the bodies"
