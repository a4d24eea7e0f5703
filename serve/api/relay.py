"""Relays requests to backends that speak OpenAI's protocol; the bytes of answers pass through.

The request body was parsed once, to be checked. The backend gets the client's bytes, with single
fields changed in place (`outgoing`). So a large body is not serialized again, and everything else
stays as the client wrote it. If the bytes are ambiguous, the body is serialized from the decoded
form. The answer is JSON, or a stream of events (events.py, named_events.py).
"""

import asyncio
import functools
import json
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any

from octet.errors import BackendError, BackendUnavailable, RequestError, UnsupportedField
from serve.api.errors import error_bytes
from serve.api.events import (
    EventReader,
    Rewrite,
    aborted_at,
    aborts,
    close,
    decoded,
    error_of,
    is_object,
    lost_by_abort,
    read_large_usage,
    read_usage,
    rewritten,
)
from serve.api.named_events import NamedEventReader, Names, deltas_in, require_reason
from serve.api.operation import EVENT_STREAM, JSON, Answer, Call, Tally, joined, too_long
from serve.backends.base import Backend, Relay, RelayingBackend, relays
from serve.backends.bounds import MAX_REFUSAL, PARSED
from serve.backends.openai_errors import failure, from_event, retry_after

__all__ = ["AnsweredFailure", "open_relay", "outgoing", "relaying"]

_ESCAPED_LETTER = re.compile(rb"\\u00(?:6[4-5cCdDfF])")  # an escape of one of d, e, l, m, o
_MODEL = re.compile(rb'"model"\s*:\s*"(?:[^"\\]|\\.)*"', re.DOTALL)


def outgoing(
    raw: bytes,
    data: dict[str, Any],
    model: str,
    *,
    counted: bool,
    added: Mapping[str, Any] | None = None,
) -> bytes:
    """Returns the body for the backend: `raw`, whose decoded form is `data`, naming `model`.

    `counted` also requests the usage at a stream's end. The fields of `added` are set as well.
    """
    fields = {k: v for k, v in (added or {}).items() if k not in data or data[k] != v}
    if counted:
        options = dict(data.get("stream_options") or {})
        # Has an effect only with include_usage, which the client did not set.
        options.pop("continuous_usage_stats", None)
        fields["stream_options"] = options | {"include_usage": True}
    changes = fields
    renamed: bytes | None = raw
    if data.get("model", model) != model:
        changes = fields | {"model": model}
        renamed = _with_model(raw, model)
    if renamed is None or fields.keys() & data.keys():
        return json.dumps(data | changes, separators=(",", ":")).encode()
    return _with_fields(renamed, fields) if fields else renamed


def _with_model(raw: bytes, model: str) -> bytes | None:
    """Replaces the model's name in the bytes; None if the field cannot be found for certain.

    Nested objects may have a field `model` too, and a key may be written with escapes. If none of
    the letters of "model" is escaped anywhere in the body, a single `"model"` is the field sought.
    """
    if raw.count(b'"model"') != 1 or _ESCAPED_LETTER.search(raw):
        return None
    found = _MODEL.search(raw)
    if found is None:
        return None
    return raw[: found.start()] + b'"model":' + json.dumps(model).encode() + raw[found.end() :]


def _with_fields(raw: bytes, fields: Mapping[str, Any]) -> bytes:
    at = raw.index(b"{") + 1  # an object, and not an empty one: it has a model
    written = json.dumps(fields, separators=(",", ":")).encode()
    return raw[:at] + written[1:-1] + b"," + raw[at:]


class AnsweredFailure(BackendUnavailable):
    """A failure with an answer of the backend, sent to the client if no other backend succeeds."""

    def __init__(self, error: BackendError, answer: Answer) -> None:
        super().__init__(str(error), kind=error.kind, retry_after_s=error.retry_after_s)
        self.answer = answer


def relaying(backend: Backend, path: str) -> RelayingBackend:
    """Returns `backend`. Raises UnsupportedField if it does not relay requests, such as `path`."""
    if relays(backend):
        return backend
    raise UnsupportedField(
        f"{backend.name} does not have {path}; vLLM has it: serve the model with `vllm serve`,"
        " from `octet export checkpoint`",
        param="model",
        code="unsupported_operation",
    )


async def open_relay(
    backend: RelayingBackend,
    call: Call,
    names: Names | None = None,
    added: Mapping[str, Any] | None = None,
) -> Answer:
    """Forwards the request, and waits for the first whole event, or for the whole body.

    `names` are those of the protocol's events, if they have any. `added` are fields to set in the
    body.

    Raises BackendError if the backend fails before that. An answer whose status is not 200
    describes what is wrong with the request.
    """
    data, name = call.data, backend.name
    hides_usage = False
    if call.streamed and names is None:  # protocols whose events have names always send it
        options = data.get("stream_options")
        hides_usage = not (options and options.get("include_usage"))
    write = functools.partial(
        outgoing, call.raw, data, backend.served_name, counted=hides_usage, added=added
    )
    raw = write() if len(call.raw) <= PARSED else await asyncio.to_thread(write)
    relay = await backend.relay(call.path, raw, call.headers)
    same = backend.served_name == call.model
    rewrite = None if same else _renamer(backend.served_name, call.model)
    try:
        if relay.status != 200:
            return await _refusal(name, call.path, relay)
        if not relay.headers.get("content-type", "").startswith("text/event"):
            return await _read_whole(name, relay, rewrite, call.max_answer_bytes, names)
        if names is None:
            reader = EventReader(name, relay.body, rewrite, hides_usage=hides_usage)
        else:
            reader = NamedEventReader(name, relay.body, rewrite, names, len(raw))
        first = await reader.first()
    except BaseException:
        await close(relay.body)
        raise
    answer = Answer(200, _headers(relay, EVENT_STREAM), first, reader.rest(), reader.tally)
    if names is not None:
        answer.events_in = deltas_in
    return answer


async def _refusal(name: str, path: str, relay: Relay) -> Answer:
    """Returns a backend's refusal of a request as an error object.

    Raises BackendError if the backend is at fault, UnsupportedField if it lacks `path` or the
    model, because another backend may have it.
    """
    body = await _beginning(relay.body, MAX_REFUSAL)
    error = failure(name, relay.status, relay.headers, body)
    headers = _headers(relay, JSON)
    if relay.status == 501:  # vLLM's status for what its model does not support
        raise _unsupported(f"{name} cannot do this: {error}", 400)  # clients retry a 5xx
    if not _is_error_object(body):
        if relay.status in (404, 405):
            raise _unsupported(f"{name} does not have {path} ({error})", relay.status)
        # A framework's own message, a proxy's page, or nothing: the client gets only the status.
        body = error_bytes(error)
    elif relay.status == 404:  # the gateway chose the model's name at the backend, not the client
        raise UnsupportedField(str(error), status=404, param="model", code="model_not_found")
    answer = Answer(relay.status, headers, body)
    if isinstance(error, RequestError):
        return answer
    if relay.status == 429 or 500 <= relay.status < 600:  # a valid status, to pass on
        raise AnsweredFailure(error, answer)
    raise error


def _unsupported(message: str, status: int) -> UnsupportedField:
    return UnsupportedField(message, status=status, code="unsupported_operation")


def _is_error_object(body: bytes) -> bool:
    """Decides whether `body` is an error object in OpenAI's form."""
    try:
        return isinstance(decoded(body)["error"]["message"], str)
    except (ValueError, LookupError, TypeError):
        return False


async def _read_whole(
    name: str, relay: Relay, rewrite: Rewrite | None, limit: int, names: Names | None
) -> Answer:
    """Returns an answer that is not streamed, of at most `limit` bytes, and reads its usage.

    Raises BackendError if it is not JSON, or was aborted, and the error that it reports.
    """
    body, tally = await _read(name, relay.body, limit), Tally()
    # Answers of the named protocols may repeat the request's JSON, and mark an abort otherwise.
    may_abort = names is None
    if len(body) > PARSED:
        body = await _large(name, body, rewrite, tally, may_abort=may_abort)
    else:
        if may_abort and aborted_at(body) >= 0:
            raise lost_by_abort(name)
        try:
            content = decoded(body)
        except ValueError:
            raise BackendError(f"{name}: answered with no JSON", kind="garbled") from None
        if isinstance(content, dict):
            if (error := error_of(content)) is not None:
                raise from_event(name, error)
            read_usage(content, tally)
        if rewrite is not None:
            body = rewrite(body)
    if names is not None and names.has_reason:
        await require_reason(name, body)
    return Answer(200, _headers(relay, JSON), body, tally=tally)


async def _large(
    name: str, body: bytes, rewrite: Rewrite | None, tally: Tally, *, may_abort: bool
) -> bytes:
    """Returns a large answer for the client, and reads its usage, without parsing the rest."""
    if not is_object(body[:1], body[-PARSED:]):
        raise BackendError(f"{name}: answered with no JSON", kind="garbled")
    if may_abort and await aborts(body):
        raise lost_by_abort(name)
    await read_large_usage(body, tally)
    return await rewritten(body, rewrite)


async def _read(name: str, body: AsyncIterator[bytes], limit: int) -> bytes:
    """Returns the whole body. Raises RequestError if it has more than `limit` bytes.

    That does not count as a failure of the backend: the request may need such a long answer, and
    another backend would send as much.
    """
    pieces: list[bytes] = []
    size = 0
    try:
        async for piece in body:
            size += len(piece)
            if size > limit:
                raise too_long(name, limit)
            pieces.append(piece)
        return await joined(pieces)
    finally:
        pieces.clear()  # otherwise the traceback of an error would keep them in memory
        await close(body)


async def _beginning(body: AsyncIterator[bytes], limit: int) -> bytes:
    """Returns at most `limit` bytes of the body, and closes it."""
    found = bytearray()
    try:
        async for piece in body:
            found += piece
            if len(found) >= limit:
                break
    finally:
        await close(body)
    return bytes(found[:limit])


def _headers(relay: Relay, content_type: str) -> dict[str, str]:
    """Returns the headers for the client: a browser must not read the answer as a page."""
    headers = {"content-type": content_type, "x-content-type-options": "nosniff"}
    after = relay.headers.get("retry-after", "")
    if after and after.isascii() and after.isprintable() and retry_after(after) is not None:
        headers["retry-after"] = after
    return headers


@functools.lru_cache(1024)
def _renamer(served_name: str, alias: str) -> Rewrite:
    """Returns a function that replaces `served_name` by `alias` in the `model` field.

    Generated text cannot match: inside a JSON string each quote is escaped.
    """
    written = (json.dumps(served_name, ensure_ascii=ascii).encode() for ascii in (True, False))
    pattern = re.compile(rb'(?<!\\)"model"\s*:\s*(?:' + b"|".join(map(re.escape, written)) + b")")
    replacement = b'"model":' + json.dumps(alias).encode()
    return lambda piece: pattern.sub(lambda _match: replacement, piece)
