"""Server-sent events of a backend: forwarded whole, parsed only where necessary.

A stream is cut only between events. A backend that dies in the middle of an event therefore leaves
no half event with the client, and the client can read the error event that follows.

Searches for names of JSON fields run on the raw bytes. Generated text cannot match, because inside
a JSON string every quote is escaped.

The work on one piece is linear in its size, which the backend limits (`bounds.PIECE`). An event
longer than `PARSED` is not parsed, and is searched in slices.
"""

import asyncio
import contextlib
import itertools
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from typing import Any

from octet.errors import BackendError, RequestError
from serve.api.operation import Tally
from serve.backends.bounds import (
    MAX_EVENT,
    MAX_EVENTS,
    MAX_FIELDS,
    MAX_PREAMBLE,
    MAX_TOKENS,
    PARSED,
)
from serve.backends.openai_errors import from_event

__all__ = [
    "EventReader",
    "Rewrite",
    "aborted_at",
    "aborts",
    "close",
    "data_lines",
    "decoded",
    "error_of",
    "is_object",
    "json_object",
    "lost_by_abort",
    "occurrences",
    "read_large_usage",
    "read_usage",
    "rewritten",
    "split_events",
]

END_S = 1.0  # limit of the wait for the end of the body after [DONE]
Rewrite = Callable[[bytes], bytes]
_SLICE = 1024 * 1024  # bytes, searched in under 1 ms
_FIELD = 4096  # bytes that a usage, or a model's name, may take

_ENDS = (b"\n\n", b"\r\n\r\n")
# Valid beginnings of a line; an empty line may be left over from the previous event.
_BEGINNINGS = (b"data:", b":", b"event:", b"id:", b"retry:", b"\n", b"\r\n")
_ABORTED = re.compile(rb'"finish_reason"\s*:\s*"abort"')
_NO_USAGE = re.compile(rb',\s*"usage"\s*:\s*null')
_USAGE = re.compile(rb'"usage"\s*:\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})')
_DONE = re.compile(rb"^data:[ \t]*\[DONE\][ \t\r]*$", re.MULTILINE)
_BLANK_LINE = re.compile(rb"\n\r?\n")


class EventReader:
    """Reads one stream: `first()`, then all of `rest()`. Closing `rest()` closes `body`."""

    last = "[DONE]"  # the event that ends a complete stream, for messages
    max_preamble = MAX_PREAMBLE

    def __init__(
        self,
        name: str,
        body: AsyncIterator[bytes],
        rewrite: Rewrite | None = None,
        *,
        hides_usage: bool = False,
    ) -> None:
        """`hides_usage` removes the usage, which the gateway requested and not the client."""
        self.tally = Tally()
        self._name = name
        self._body = body
        self._rewrite = rewrite
        self._hides_usage = hides_usage
        self._aborted = False  # the backend aborted the request, after the events read so far
        self._rest = self._events()

    async def first(self) -> bytes:
        """Returns the first event with a token, and those before it: comments, a chat's roles.

        Raises BackendError if no such event comes, RequestError if the backend reports an error
        that the client made.
        """
        before: list[bytes] = []
        size = 0
        async for events in self._rest:
            before.append(events)
            if self._has_content(events):
                return b"".join(before)
            if self.tally.ended:  # without a token: vLLM aborted the request, and sends no reason
                raise lost_by_abort(self._name)
            size += len(events)
            if size > self.max_preamble:
                raise self._garbled("sent nothing but comments")
        raise self._garbled("ended before its first event")

    def rest(self) -> AsyncGenerator[bytes, None]:
        """Yields the events after `first()` as they come. Raises BackendError if they break off."""
        return self._rest

    async def _events(self) -> AsyncGenerator[bytes, None]:
        held = bytearray()  # the beginning of an event that has not ended
        try:
            async for piece in self._body:
                searched = 0
                if not held and piece.endswith(_ENDS):
                    events = piece
                else:
                    searched = max(0, len(held) - 3)  # a blank line may span two pieces
                    held += piece
                    end = _end_of_events(held, searched)
                    if end == 0:
                        if len(held) > MAX_EVENT:
                            raise self._garbled(f"sent an event of more than {MAX_EVENT} bytes")
                        continue
                    events = bytes(held[:end])
                    del held[:end]
                if not events.startswith(_BEGINNINGS):
                    raise self._garbled("sent something that is no event")
                # Only the first event began in an earlier piece, and can be long.
                if len(events) > PARSED and (end := _end_of_first(events, searched)) > PARSED:
                    event = await self._read_long(events[:end])
                    if event:
                        yield event
                    events = b"" if self._aborted or self.tally.ended else events[end:]
                events = self._read(events)
                if events:
                    yield events
                if self._aborted:
                    raise lost_by_abort(self._name)
                if self.tally.ended:
                    await self._drain()
                    return
        finally:
            await close(self._body)
        if len(held) > PARSED or not self._is_last(bytes(held)):
            raise self._garbled(f"ended its stream without {self.last}")
        self.tally.ended = True
        yield bytes(held)

    def _read(self, events: bytes) -> bytes:
        """Returns what goes to the client; records the usage, an error, and the end."""
        if len(events) > 2 * MAX_EVENTS and len(_BLANK_LINE.findall(events)) > MAX_EVENTS:
            raise self._garbled(f"sent more than {MAX_EVENTS} events at once")
        if b'"abort"' in events and (aborted := aborted_at(events)) >= 0:
            self._aborted = True
            begins = [end for end in _ends(events) if end <= aborted]
            events = events[: begins[-1] if begins else 0]
        at = events.find(b"[DONE]")  # first, because the regular expression is slow
        if at >= 0 and (done := _DONE.search(events, events.rfind(b"\n", 0, at) + 1)):
            self.tally.ended = True
            blank = _BLANK_LINE.search(events, done.end())
            events = events[: len(events) if blank is None else blank.end()]
        if b'"usage"' in events:
            events = self._strip_usage(events)
        if b'"error"' in events:
            self._note_error(events)
        return events if self._rewrite is None else self._rewrite(events)

    def _is_last(self, event: bytes) -> bool:
        """Decides whether a stream may end with `event`, whose blank line is missing."""
        return _DONE.search(event) is not None

    async def _read_long(self, event: bytes) -> bytes:
        """Does the same as `_read` for one event of more than `PARSED` bytes."""
        if await aborts(event):
            self._aborted = True
            return b""
        await read_large_usage(event, self.tally)
        if b'"error"' in event and b'"choices"' not in event:
            self.tally.failed = BackendError(f"{self._name}: failed while answering")
        return await rewritten(event, self._rewrite)

    async def _drain(self) -> None:
        """Waits for the end of a complete body, so that its connection can be reused."""
        with contextlib.suppress(TimeoutError, BackendError):
            async with asyncio.timeout(END_S):
                async for _piece in self._body:
                    pass

    def _has_content(self, events: bytes) -> bool:
        """Decides whether `events` hold more than usage and a role. Raises if one is an error."""
        if len(events) > PARSED:  # a single event, which is not parsed
            if self.tally.failed is not None:
                raise self.tally.failed
            if not is_object(events.partition(b"data:")[2][:_SLICE], events[-_FIELD:]):
                raise self._garbled("sent an event that is no JSON object")
            return True
        first = True
        for event in split_events(events):
            lines = data_lines(event)
            if not lines:
                continue
            if first:
                data, first = b"\n".join(lines), False
                if data == b"[DONE]":
                    return False
                chunk = self._chunk(data)
                lines = []
                if _has_token(chunk):
                    return True
            for line in lines:
                if line != b"[DONE]" and _has_token(self._without_error(json_object(line))):
                    return True
        return False

    def _chunk(self, data: bytes) -> dict[str, Any]:
        """Decodes an event. Raises BackendError if it is no JSON object, or the error in it."""
        try:
            chunk = decoded(data)
        except ValueError:
            raise self._garbled("sent an event that is no JSON") from None
        if not isinstance(chunk, dict):
            raise self._garbled("sent an event that is no JSON object")
        return self._without_error(chunk)

    def _without_error(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """Returns `chunk`. Raises the error that it reports, if any."""
        if (error := error_of(chunk)) is not None:
            raise from_event(self._name, error)
        return chunk

    def _note_error(self, events: bytes) -> None:
        """Records the first error that `events` report."""
        for line in data_lines(events):
            error = error_of(json_object(line))
            if error is not None:
                self.tally.failed = from_event(self._name, error)
                return

    def _strip_usage(self, events: bytes) -> bytes:
        """Reads the usage, and returns the events that remain for the client.

        Usage comes in an event of its own before [DONE], and in every event if the request
        enables that. Some servers write `null` into the other events.
        """
        if self._hides_usage:
            events = _NO_USAGE.sub(b"", events)
            if b'"usage"' not in events:
                return events
        begin = _end_of_events(events[: events.index(b'"usage"')])
        rest = [event for event in split_events(events[begin:]) if not self._is_hidden(event)]
        return b"".join([events[:begin], *rest])

    def _is_hidden(self, event: bytes) -> bool:
        """Reads the usage of an event, if it has any; decides whether to hide the event."""
        if b'"usage"' not in event:
            return False
        chunk = json_object(b"\n".join(data_lines(event)))
        read_usage(chunk, self.tally)
        alone = chunk.get("choices") == [] and isinstance(chunk.get("usage"), dict)
        return alone and self._hides_usage

    def _garbled(self, what: str) -> BackendError:
        return BackendError(f"{self._name}: {what}", kind="garbled")


def aborted_at(answer: bytes) -> int:
    """Returns the offset of a finish reason `abort` in `answer`, or -1 if there is none.

    A vLLM server that is stopped ends all its requests this way, with whatever was generated,
    which may be nothing.
    """
    found = _ABORTED.search(answer) if b'"abort"' in answer else None
    return -1 if found is None else found.start()


def lost_by_abort(name: str) -> BackendError:
    return BackendError(f"{name}: aborted the request", kind="lost")


def decoded(data: bytes) -> Any:
    """Decodes JSON. Raises ValueError if it is invalid or nested unreasonably deep."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_usage(answer: dict[str, Any], tally: Tally) -> None:
    """Records the usage of `answer` in `tally`, if there is any.

    Sets both counts to None if one of them is not a plausible integer.
    """
    usage = answer.get("usage")
    if not isinstance(usage, dict):
        return
    prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens") or 0
    if prompt is None and "input_tokens" in usage:  # Responses and Messages
        prompt, completion = _input_tokens(usage), usage.get("output_tokens") or 0
    if _is_count(prompt) and _is_count(completion):
        tally.prompt_tokens, tally.completion_tokens = prompt, completion
    else:
        tally.prompt_tokens = tally.completion_tokens = None


def _input_tokens(usage: dict[str, Any]) -> int | None:
    """Returns all tokens of the prompt; Anthropic counts those from a prefix cache separately."""
    cached = ("cache_creation_input_tokens", "cache_read_input_tokens")
    counts = [usage["input_tokens"], *(usage.get(name) or 0 for name in cached)]
    return sum(counts) if all(map(_is_count, counts)) else None


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MAX_TOKENS


async def occurrences(body: bytes, field: bytes) -> list[int]:
    """Returns the offsets of `field` in `body`, in slices between which other requests run.

    Raises RequestError if there are more than `MAX_FIELDS`: an error that does not count as a
    failure of the backend, because an answer may repeat JSON of its request.
    """
    found: list[int] = []
    for start in range(0, len(body), _SLICE):
        if start:
            await asyncio.sleep(0)
        at, end = start - 1, start + _SLICE + len(field) - 1
        while (at := body.find(field, at + 1, end)) >= 0:
            found.append(at)
            if len(found) > MAX_FIELDS:
                raise RequestError(
                    f"the answer has more than {MAX_FIELDS} fields {field.decode()}",
                    status=502,
                    code="answer_too_large",
                    kind="backend_error",
                )
    return found


async def aborts(body: bytes) -> bool:
    """Does the same as `aborted_at` for a large answer, but only decides whether there is one."""
    if not await occurrences(body, b'"abort"'):
        return False
    found = await occurrences(body, b'"finish_reason"')
    return any(_ABORTED.match(body, at, at + _FIELD) for at in found)


async def read_large_usage(body: bytes, tally: Tally) -> None:
    """Does the same as `read_usage` for a large answer, which is not parsed.

    If several fields `usage` are found, the largest counts: others may be in the request's tools,
    which an answer may repeat, or in JSON that the model generated.
    """
    most = 0
    for at in await occurrences(body, b'"usage"'):
        if found := _USAGE.match(body, at, at + _FIELD):
            one = Tally()
            read_usage({"usage": json_object(found[1])}, one)
            tokens = (one.prompt_tokens or 0) + (one.completion_tokens or 0)
            if tokens >= most:
                most = tokens
                tally.prompt_tokens = one.prompt_tokens
                tally.completion_tokens = one.completion_tokens


async def rewritten(body: bytes, rewrite: Rewrite | None) -> bytes:
    """Applies `rewrite`, which changes only the field `model`, to a large answer."""
    if rewrite is None:
        return body
    kept: list[bytes] = []
    end = 0
    found = await occurrences(body, b'"model"')
    for at, following in itertools.pairwise([*found, len(body)]):
        if body[at - 1 : at] != b"\\":
            kept += body[end:at], rewrite(body[at : min(at + _FIELD, following)])
            end = min(at + _FIELD, following)
    return b"".join([*kept, body[end:]])


def is_object(head: bytes, tail: bytes) -> bool:
    """Decides, by its first and last bytes, whether a large answer may be a JSON object or list."""
    return head.lstrip()[:1] + tail.rstrip()[-1:] in (b"{}", b"[]")


async def close(body: AsyncIterator[bytes]) -> None:
    """Closes `body`, which cancels the request at the backend."""
    aclose = getattr(body, "aclose", None)
    if aclose is not None:
        await aclose()


def _end_of_events(held: bytes | bytearray, start: int = 0) -> int:
    """Returns where the last whole event of `held` ends, if that is after `start`; else 0.

    Lines may end in CRLF.
    """
    lf, crlf = held.rfind(b"\n\n", start), held.rfind(b"\n\r\n", start)
    return max(lf + 2 if lf >= 0 else 0, crlf + 3 if crlf >= 0 else 0)


def _end_of_first(events: bytes, start: int) -> int:
    """Returns the offset of the first end of an event after `start`."""
    lf, crlf = events.find(b"\n\n", start), events.find(b"\n\r\n", start)
    ends = [lf + 2 if lf >= 0 else len(events), crlf + 3 if crlf >= 0 else len(events)]
    return min(ends)


def _ends(events: bytes) -> list[int]:
    """Returns the offset at which each event ends."""
    return [blank.end() for blank in _BLANK_LINE.finditer(events)]


def split_events(events: bytes) -> Iterator[bytes]:
    """Yields each event with its blank line."""
    begin = 0
    for blank in _BLANK_LINE.finditer(events):
        yield events[begin : blank.end()]
        begin = blank.end()
    if begin < len(events):
        yield events[begin:]


def data_lines(events: bytes | bytearray) -> list[bytes]:
    """Returns the content of each line `data: ...`."""
    return [bytes(line[5:].strip()) for line in events.splitlines() if line.startswith(b"data:")]


def _has_token(chunk: dict[str, Any]) -> bool:
    """Decides whether `chunk` holds more than usage and roles."""
    choices = chunk.get("choices")
    return not isinstance(choices, list) or not all(map(_is_role, choices))


def _is_role(choice: Any) -> bool:
    """Decides whether `choice` holds only a role, which some servers send before any token."""
    delta = choice.get("delta") if isinstance(choice, dict) else None
    if not isinstance(delta, dict) or choice.get("finish_reason") is not None:
        return False
    return not any(value for name, value in delta.items() if name != "role")


def json_object(line: bytes) -> dict[str, Any]:
    """Returns the JSON object in `line`, or an empty one if there is none."""
    try:
        found = decoded(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def error_of(chunk: dict[str, Any]) -> Any:
    """Returns the error in `chunk`, in any of the shapes that servers use; None if none."""
    if chunk.get("choices") is not None:
        return None
    if chunk.get("type") == "response.failed":
        response = chunk.get("response")
        return (response.get("error") if isinstance(response, dict) else None) or chunk
    if chunk.get("object") == "error" or chunk.get("type") == "error":
        return chunk.get("error") or chunk
    return chunk.get("error")
