"""Answers of backends that speak OpenAI's protocol: their bytes pass through.

The request body was parsed once, to be checked; it goes on verbatim, or with the model's name
replaced where the backend knows it by another. Of a stream, only the boundaries between events
are sought, and the usage in its tail is read.
"""

import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from octet.errors import BackendError, BackendUnavailable
from serve.api.errors import error_bytes
from serve.api.exchange import EVENT_STREAM, JSON, Answer, Tally
from serve.backends.base import Relay, RelayingBackend

__all__ = ["open_relay"]

_FORWARDED = ("content-type", "retry-after")
Rewrite = Callable[[bytes], bytes]


async def open_relay(
    backend: RelayingBackend,
    path: str,
    body: bytes,
    data: dict[str, Any],
    *,
    request_id: str,
) -> Answer:
    """Sends the request on, and waits for the first whole event, or for the whole body.

    Raises BackendUnavailable if the backend fails before that.
    """
    alias, served_name = data["model"], backend.served_name
    rewrite: Rewrite | None = None
    if served_name != alias:
        body = json.dumps(data | {"model": served_name}).encode()
        rewrite = _renamer(served_name, alias)
    headers = {"content-type": JSON, "x-request-id": request_id}
    relay = await backend.relay(path, body, headers)
    headers = {name: relay.headers[name] for name in _FORWARDED if name in relay.headers}
    tally = Tally()
    try:
        if relay.status != 200 or not headers.get("content-type", "").startswith("text/event"):
            return await _whole(relay, headers, rewrite, tally)
        events = _events(relay, rewrite, tally)
        first = await anext(events, b"")
    except BackendError as error:
        raise BackendUnavailable(f"{error} before its first byte") from error
    except BaseException:
        await _close(relay.body)
        raise
    return Answer(200, {"content-type": EVENT_STREAM, **headers}, first, events, tally)


async def _whole(
    relay: Relay, headers: dict[str, str], rewrite: Rewrite | None, tally: Tally
) -> Answer:
    try:
        body = b"".join([piece async for piece in relay.body])
    finally:
        await _close(relay.body)
    if relay.status == 200:
        _read_usage(body, tally)
        if rewrite is not None:
            body = rewrite(body)
    elif not headers.get("content-type", "").startswith(JSON):
        # A proxy's error page: the status stays, the body becomes an error object.
        text = body[:200].decode(errors="replace")
        body = error_bytes(BackendError(f"the backend answered {relay.status}: {text}"))
        headers["content-type"] = JSON
    return Answer(relay.status, headers, body, tally=tally)


async def _events(
    relay: Relay, rewrite: Rewrite | None, tally: Tally
) -> AsyncGenerator[bytes, None]:
    """The stream's bytes as they come, cut only between events.

    So a backend that dies half-way through an event leaves no half event with the client, and the
    error that follows can be read. A stream that ends without `[DONE]` raises BackendError.
    """
    held = b""
    done = False
    try:
        async for piece in relay.body:
            held = held + piece if held else piece
            end = _end_of_events(held)
            if end == 0:
                continue
            events, held = (held, b"") if end == len(held) else (held[:end], held[end:])
            # The usage comes in the last event before [DONE], or with every one where asked for.
            if b'"usage"' in events:
                _read_stream_usage(events, tally)
            done = done or _is_done(events)
            yield events if rewrite is None else rewrite(events)
    finally:
        await _close(relay.body)
    if not done and not _is_done(held):
        raise BackendError("the backend's stream ended without [DONE]")
    if held:
        yield held


def _end_of_events(held: bytes) -> int:
    """Where the last whole event of `held` ends; 0 if there is none. Lines may end in CRLF."""
    lf, crlf = held.rfind(b"\n\n"), held.rfind(b"\n\r\n")
    return max(lf + 2 if lf >= 0 else 0, crlf + 3 if crlf >= 0 else 0)


def _is_done(events: bytes) -> bool:
    # At the very end only: generated text may say [DONE] too, but its event ends in a brace.
    return events.rstrip().endswith((b"data: [DONE]", b"data:[DONE]"))


def _renamer(served_name: str, alias: str) -> Rewrite:
    """Puts `alias` where the `model` member says `served_name`.

    Generated text cannot match: inside a JSON string each quote is escaped.
    """
    pattern = re.compile(rb'(?<!\\)"model"\s*:\s*' + re.escape(json.dumps(served_name).encode()))
    replacement = b'"model":' + json.dumps(alias).encode()
    return lambda piece: pattern.sub(lambda _match: replacement, piece)


def _read_stream_usage(events: bytes, tally: Tally) -> None:
    for line in reversed(events.splitlines()):
        if line.startswith(b"data: {") and b'"usage"' in line and _read_usage(line[6:], tally):
            return


def _read_usage(body: bytes, tally: Tally) -> bool:
    try:
        usage = json.loads(body).get("usage")
        tally.prompt_tokens = int(usage["prompt_tokens"])
        tally.completion_tokens = int(usage.get("completion_tokens") or 0)
    except (ValueError, TypeError, KeyError, AttributeError):
        return False  # not ours to judge: the client gets the bytes all the same
    return True


async def _close(body: AsyncIterator[bytes]) -> None:
    close = getattr(body, "aclose", None)
    if close is not None:
        await close()
