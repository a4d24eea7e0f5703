"""The outermost middleware: ids, status, figures, whatever happens inside."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.types import Message

from serve.telemetry.observation import Observation, Observe, current
from tests.serve.telemetry.conftest import Figures

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
Inside = Callable[[Observation], Awaitable[None]]


async def ask(
    figures: Figures,
    *,
    path: str = "/v1/chat/completions",
    headers: dict[str, str] | None = None,
    inside: Inside | None = None,
    **options: Any,
) -> tuple[Observation, list[dict[str, Any]]]:
    """One request through `Observe`, and what was sent to its client."""
    sent: list[dict[str, Any]] = []
    seen: list[Observation] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["octet"])
        if inside is not None:
            await inside(scope["octet"])
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def receive() -> Message:
        return {"type": "http.request", "body": b""}

    async def send(message: Message) -> None:
        sent.append(dict(message))

    raw = [(name.encode(), value.encode("latin-1")) for name, value in (headers or {}).items()]
    scope = {"type": "http", "method": "POST", "path": path, "headers": raw}
    await Observe(app, figures.metrics, **options)(scope, receive, send)
    return seen[0], sent


async def test_the_clients_id_is_kept_and_echoed(figures: Figures) -> None:
    observation, sent = await ask(figures, headers={"x-request-id": "mine-1"})
    assert observation.id == "mine-1"
    assert sent[0]["headers"] == [(b"x-request-id", b"mine-1")]
    assert observation.headers_out() == {"x-request-id": "mine-1"}


@pytest.mark.parametrize("bad", ["", "a b", "x" * 129, 'quote"', "ümlaut", "line\nbreak"])
async def test_an_id_that_could_harm_a_log_is_replaced(figures: Figures, bad: str) -> None:
    observation, _ = await ask(figures, headers={"x-request-id": bad})
    assert len(observation.id) == 32
    assert set(observation.id) <= set("0123456789abcdef")


async def test_the_trace_goes_on_where_tracing_is_off(figures: Figures) -> None:
    headers = {"traceparent": TRACEPARENT, "tracestate": "vendor=1"}
    observation, _ = await ask(figures, headers=headers)
    assert observation.headers_out() == headers | {"x-request-id": observation.id}


@pytest.mark.parametrize(
    "bad",
    [
        "",
        TRACEPARENT[:-1],
        TRACEPARENT.upper(),
        TRACEPARENT.replace("00-", "ff-", 1),
        f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"00-0af7651916cd43dd8448eb211c80319c-{'0' * 16}-01",
        TRACEPARENT + "\r\nx: y",
        TRACEPARENT + "-\x01",
        TRACEPARENT + "-\u00e9",
    ],
)
async def test_a_malformed_trace_is_dropped(figures: Figures, bad: str) -> None:
    observation, _ = await ask(figures, headers={"traceparent": bad, "tracestate": "vendor=1"})
    assert observation.headers_out() == {"x-request-id": observation.id}


async def test_requests_are_counted_while_and_after_they_run(figures: Figures) -> None:
    async def inside(observation: Observation) -> None:
        assert figures.value("octet_requests_in_flight", endpoint=observation.endpoint) == 1
        assert current.get() is observation

    await ask(figures, inside=inside)
    assert figures.value("octet_requests_in_flight", endpoint="/v1/chat/completions") == 0
    assert figures.only("octet_requests_total") == {("/v1/chat/completions", "", "201"): 1}
    assert current.get() is None


async def test_unknown_paths_share_a_series(figures: Figures) -> None:
    for path in ("/a", "/b", "/v1/chat/completions/"):
        await ask(figures, path=path)
    for name in ("a", "b/c"):  # a name may have slashes
        await ask(figures, path=f"/v1/models/{name}")
    assert figures.only("octet_requests_total") == {
        ("other", "", "201"): 3,
        ("/v1/models/{model}", "", "201"): 2,
    }


async def test_a_client_that_went_away_is_a_499(figures: Figures) -> None:
    async def inside(observation: Observation) -> None:
        observation.gone = True

    await ask(figures, inside=inside)
    assert figures.only("octet_requests_total") == {("/v1/chat/completions", "", "499"): 1}
    assert figures.only("octet_client_disconnects_total") == {("/v1/chat/completions",): 1}


async def test_a_crash_inside_is_a_500(figures: Figures) -> None:
    async def inside(_observation: Observation) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await ask(figures, inside=inside)
    assert figures.only("octet_requests_total") == {("/v1/chat/completions", "", "500"): 1}
    assert figures.value("octet_requests_in_flight", endpoint="/v1/chat/completions") == 0


async def test_access_lines_are_written_if_asked_for(
    figures: Figures, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await ask(figures)
    assert not caplog.records
    await ask(figures, access_log=True)
    (record,) = caplog.records
    assert record.name == "octet.access"
    assert vars(record)["fields"]["status"] == 201
    await ask(figures, access_log=True, path="/metrics")
    assert len(caplog.records) == 1  # or each scrape would be a line


async def test_what_is_no_http_passes(figures: Figures) -> None:
    seen: list[str] = []

    async def app(scope: Any, _receive: Any, _send: Any) -> None:
        seen.append(scope["type"])

    nobody: Any = None
    await Observe(app, figures.metrics)({"type": "lifespan"}, nobody, nobody)
    assert seen == ["lifespan"]
