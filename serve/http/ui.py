"""The status page at /ui: one HTML file, one style sheet, one script, and a stream of reports.

A report is what /status returns, with a summary of it. Streams share each report, so that it is
made once whatever the number of open pages. The page keeps nothing but the latest one.
"""

import asyncio
import contextlib
import json
import math
import time
from collections.abc import AsyncIterator, Callable
from importlib import resources

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse
from jinja2 import Environment, StrictUndefined
from starlette.types import Receive, Scope, Send

from octet import __version__
from octet.errors import RequestError
from octet.page import stylesheet
from serve.gateway import status
from serve.gateway.state import Gateway
from serve.http.status_page import problems_of, title_of

__all__ = ["EVENTS", "EVERY_S", "MOST_STREAMS", "add_page"]

EVENTS = "/ui/events"
EVERY_S = 2.0  # between the reports of a stream
DRAINING_S = 0.25  # while draining: the end of the last request also ends the streams
FRESH_S = 1.0  # the age up to which a report is sent to another stream too
MOST_STREAMS = 32
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:;"
    " form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # else an upgraded gateway would be shown by an old script
}


def add_page(
    router: APIRouter, gateway: Gateway, is_admin: Callable[[Request], bool], *, own_port: bool
) -> None:
    """Adds /ui and its files to `router`; `is_admin` decides who gets addresses and errors."""
    files = resources.files("serve.http")
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    template = environment.from_string((files / "ui.html.jinja").read_text("utf-8"))
    page = template.render(version=__version__)
    style = stylesheet() + (files / "ui.css").read_text("utf-8")
    script = (files / "ui.js").read_text("utf-8")
    streams = _Streams(gateway, own_port)

    def add(path: str, content: str, media_type: str) -> None:
        async def file() -> Response:
            return Response(content, headers=_HEADERS, media_type=media_type)

        router.add_api_route(path, file, methods=["GET"], include_in_schema=False)

    add("/ui", page, "text/html")
    add("/ui/page.css", style, "text/css")
    add("/ui/page.js", script, "text/javascript")

    @router.get(EVENTS, include_in_schema=False)
    async def events(request: Request) -> Response:
        return _Stream(streams, lambda: is_admin(request))


class _Streams:
    """The open streams of one application, and the reports that they share."""

    def __init__(self, gateway: Gateway, own_port: bool) -> None:
        self.open = 0
        self._gateway = gateway
        self._own_port = own_port
        self._made: dict[bool, tuple[float, str]] = {}  # by whether it has addresses

    async def reports(self, is_admin: Callable[[], bool]) -> AsyncIterator[str]:
        """Yields the events of one stream, until the gateway has drained."""
        gateway, last = self._gateway, ""
        while True:
            report = self._report(is_admin())
            if report is not last:
                yield report
                last = report
            if not gateway.draining:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(EVERY_S):
                        await gateway.drain_begun.wait()
            elif gateway.running:
                await asyncio.sleep(DRAINING_S)
            else:
                return

    def _report(self, addresses: bool) -> str:
        now = time.monotonic()
        at, made = self._made.get(addresses, (-math.inf, ""))
        if now - at < FRESH_S:
            return made
        config, found = self._gateway.config, status.status(self._gateway, addresses=addresses)
        problems = problems_of(found)
        administration = "open" if self._own_port else "off"
        data = {
            "title": title_of(found, problems),
            "problems": problems,
            "administration": "key" if config.admin.sha256 is not None else administration,
            "administrator": addresses,
            "keys": bool(config.access.keys or config.access.keys_file),
            **found,
        }
        text = json.dumps(data, allow_nan=False, separators=(",", ":"))
        self._made[addresses] = now, f"event: status\ndata: {text}\n\n"
        return self._made[addresses][1]


class _Stream(StreamingResponse):
    """One stream, counted as long as it is sent. Raises RequestError (503) beyond the limit."""

    def __init__(self, streams: _Streams, is_admin: Callable[[], bool]) -> None:
        headers = _HEADERS | {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(streams.reports(is_admin), headers=headers, media_type="text/event-stream")
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._streams.open >= MOST_STREAMS:
            message = f"{MOST_STREAMS} status pages are open already: close one, or try again later"
            raise RequestError(message, status=503, code="too_many_pages", retry_after_s=30.0)
        self._streams.open += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._streams.open -= 1
