"""Whatever status and headers a backend sends, the client gets a JSON error object."""

import json

import pytest

from tests.serve.conftest import serving
from tests.serve.openai_clients import relay_to
from tests.serve.upstreams import scripted, send, whole

BODY = {"model": "fake", "prompt": "x"}
RETRY_AFTER = (b"\xff\xfe", "é".encode(), b"\xc3\xa9", "٣".encode(), b"soon", b"-1", b"9" * 400)


def head(status: int, body: bytes, *fields: bytes) -> bytes:
    lines = [b"HTTP/1.1 %d Odd" % status, b"connection: close", *fields]
    return b"\r\n".join([*lines, b"content-length: %d" % len(body), b"", body])


@pytest.mark.parametrize("body", [b"", b"no JSON", b'{"error":{"message":"m"}}'], ids=len)
@pytest.mark.parametrize(
    "status", [201, 204, 299, 301, 399, 400, 418, 499, 500, 599, 600, 799, 999]
)
async def test_any_status_becomes_an_error_object(status: int, body: bytes) -> None:
    answer = head(status, b"" if status == 204 else body)
    async with (
        scripted(send(answer)) as upstream,
        serving(("fake", [relay_to(upstream.url)])) as served,
        served.session.post("/v1/completions", json=BODY) as response,
    ):
        assert 400 <= response.status < 600
        assert response.content_type == "application/json"
        assert json.loads(await response.read())["error"]["message"]


@pytest.mark.parametrize("status", [429, 503, 400])
@pytest.mark.parametrize("value", RETRY_AFTER)
async def test_a_retry_after_that_is_none_is_not_forwarded(value: bytes, status: int) -> None:
    answer = head(status, b'{"error":{"message":"m"}}', b"retry-after: " + value)
    async with (
        scripted(send(answer)) as upstream,
        serving(("fake", [relay_to(upstream.url)])) as served,
        served.session.post("/v1/completions", json=BODY) as response,
    ):
        assert response.status == status
        assert response.headers.get("retry-after", "1").isdigit()
        assert (await response.json())["error"]["message"] == "m"


async def test_a_backend_cannot_make_a_page_of_its_answer() -> None:
    for answer in (head(200, whole(), b"content-type: text/html"), head(400, b"<script>", b"")):
        async with (
            scripted(send(answer)) as upstream,
            serving(("fake", [relay_to(upstream.url)])) as served,
            served.session.post("/v1/completions", json=BODY) as response,
        ):
            assert response.content_type == "application/json"
            assert response.headers["x-content-type-options"] == "nosniff"
