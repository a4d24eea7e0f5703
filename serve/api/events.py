"""Server-sent events of a backend: forwarded whole, parsed only where necessary.

A stream is cut only between events. A backend that dies in the middle of an event therefore leaves
no half event with the client, and the client can read the error event that follows.

Searches for names of JSON fields run on the raw bytes. Generated text cannot match, because inside
a JSON string every quote is escaped.
"""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from octet.errors import BackendError
from serve.api.operation import Tally
from serve.backends.openai_errors import from_event

__all__ = [
    "EventReader",
    "aborted_at",
    "close",
    "decoded",
    "error_of",
    "lost_by_abort",
    "read_usage",
]

MAX_EVENT = 8 * 1024 * 1024  # bytes; log-probabilities of an echoed prompt can take 1M
END_S = 1.0  # limit of the wait for the end of the body after [DONE]
Rewrite = Callable[[bytes], bytes]

_ENDS = (b"\n\n", b"\r\n\r\n")
# Valid beginnings of a line; an empty line may be left over from the previous event.
_BEGINNINGS = (b"data:", b":", b"event:", b"id:", b"retry:", b"\n", b"\r\n")
_ABORTED = re.compile(rb'"finish_reason"\s*:\s*"abort"')
_NO_USAGE = re.compile(rb',\s*"usage"\s*:\s*null')


class EventReader:
    """Reads one stream: `first()`, then all of `rest()`. Closing `rest()` closes `body`."""

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
        self._rest = self._events()

    async def first(self) -> bytes:
        """Returns the first event with a token, and those before it: comments, a chat's roles.

        Raises BackendError if no such event comes, RequestError if the backend reports an error
        that the client made.
        """
        before = b""
        async for events in self._rest:
            before += events
            if self._begin(events):
                return before
            if _is_done(events):  # vLLM omits a reason that comes with no token: it was abort
                raise lost_by_abort(self._name)
            if len(before) > MAX_EVENT:
                raise self._garbled("sent nothing but comments")
        raise self._garbled("ended before its first event")

    def rest(self) -> AsyncGenerator[bytes, None]:
        """Yields the events after `first()` as they come. Raises BackendError if they break off."""
        return self._rest

    async def _events(self) -> AsyncGenerator[bytes, None]:
        held = bytearray()  # the beginning of an event that has not ended
        done = False
        try:
            async for piece in self._body:
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
                aborted = aborted_at(events)
                if aborted >= 0:
                    events = events[: _event_around(events, aborted)[0]]
                if b"[DONE]" in events:
                    done = self.tally.ended = _is_done(events)
                if b'"usage"' in events:
                    events = self._counted(events)
                if b'"error"' in events:
                    self._note_error(events)
                if events:
                    yield events if self._rewrite is None else self._rewrite(events)
                if aborted >= 0:
                    raise lost_by_abort(self._name)
                if done:
                    await self._end()
                    return
        finally:
            await close(self._body)
        if not _is_done(held):
            raise self._garbled("ended its stream without [DONE]")
        yield bytes(held)

    async def _end(self) -> None:
        """Waits for the end of a complete body, so that its connection can be reused."""
        with contextlib.suppress(TimeoutError, BackendError):
            async with asyncio.timeout(END_S):
                async for _piece in self._body:
                    pass

    def _begin(self, events: bytes) -> bool:
        """Decides whether `events` hold more than usage and a role. Raises if one is an error."""
        data = _first_data(events)
        if data is None or data == b"[DONE]":
            return False
        if _speaks(self._chunk(data)):
            return True
        others = (_object(line) for line in _data_lines(events)[1:] if line != b"[DONE]")
        return any(_speaks(self._sound(chunk)) for chunk in others)

    def _chunk(self, data: bytes) -> dict[str, Any]:
        try:
            chunk = decoded(data)
        except ValueError:
            raise self._garbled("sent an event that is no JSON") from None
        if not isinstance(chunk, dict):
            raise self._garbled("sent an event that is no JSON object")
        return self._sound(chunk)

    def _sound(self, chunk: dict[str, Any]) -> dict[str, Any]:
        if (error := error_of(chunk)) is not None:
            raise from_event(self._name, error)
        return chunk

    def _note_error(self, events: bytes) -> None:
        for line in _data_lines(events):
            error = error_of(_object(line))
            if error is not None:
                self.tally.failed = from_event(self._name, error)

    def _counted(self, events: bytes) -> bytes:
        """Reads the usage, and returns the events that remain for the client.

        Usage comes in an event of its own before [DONE], and in every event if the request
        enables that. Some servers write `null` into the other events.
        """
        if self._hides_usage:
            events = _NO_USAGE.sub(b"", events)
        start, kept = 0, b""
        while (at := events.find(b'"usage"', start)) >= 0:
            begin, end = _event_around(events, at)
            chunk = _object(b"\n".join(_data_lines(events[begin:end])))
            counted = read_usage(chunk, self.tally)
            alone = counted and chunk.get("choices") == []
            kept += events[start : begin if alone and self._hides_usage else end]
            start = end
        return kept + events[start:]

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


def read_usage(answer: dict[str, Any], tally: Tally) -> bool:
    """Records the usage of `answer` in `tally`; returns whether there is any."""
    try:
        usage = answer["usage"]
        tally.prompt_tokens = int(usage["prompt_tokens"])
        tally.completion_tokens = int(usage.get("completion_tokens") or 0)
    except (ValueError, OverflowError, TypeError, KeyError, AttributeError):
        return False  # not for the gateway to judge: the client gets the bytes anyway
    return True


async def close(body: AsyncIterator[bytes]) -> None:
    """Closes `body`, which ends whatever still runs behind it."""
    aclose = getattr(body, "aclose", None)
    if aclose is not None:
        await aclose()


def _end_of_events(held: bytearray, start: int) -> int:
    """Returns where the last whole event of `held` ends, if that is after `start`; else 0.

    Lines may end in CRLF.
    """
    lf, crlf = held.rfind(b"\n\n", start), held.rfind(b"\n\r\n", start)
    return max(lf + 2 if lf >= 0 else 0, crlf + 3 if crlf >= 0 else 0)


def _is_done(events: bytes | bytearray) -> bool:
    """Decides whether a data line holds only [DONE]; a line with generated text holds more."""
    return b"[DONE]" in _data_lines(events)


def _data_lines(events: bytes | bytearray) -> list[bytes]:
    return [bytes(line[5:].strip()) for line in events.splitlines() if line.startswith(b"data:")]


def _first_data(events: bytes) -> bytes | None:
    """Returns the data of the first event that has any."""
    end = 0
    while end < len(events):
        begin, end = _event_around(events, end)
        if lines := _data_lines(events[begin:end]):
            return b"\n".join(lines)
    return None


def _speaks(chunk: dict[str, Any]) -> bool:
    choices = chunk.get("choices")
    return not isinstance(choices, list) or not all(map(_is_role, choices))


def _is_role(choice: Any) -> bool:
    """Decides whether `choice` holds only a role, which some servers send before any token."""
    delta = choice.get("delta") if isinstance(choice, dict) else None
    if not isinstance(delta, dict) or choice.get("finish_reason") is not None:
        return False
    return not any(value for name, value in delta.items() if name != "role")


def _event_around(events: bytes, at: int) -> tuple[int, int]:
    """Returns the begin and end of the event that contains byte `at`."""
    blank = b"\r\n\r\n" if b"\r\n\r\n" in events else b"\n\n"
    begin, end = events.rfind(blank, 0, at), events.find(blank, at)
    size = len(blank)
    return begin + size if begin >= 0 else 0, end + size if end >= 0 else len(events)


def _object(line: bytes) -> dict[str, Any]:
    """Returns the JSON object in `line`, or an empty one if there is none."""
    try:
        found = decoded(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def error_of(chunk: dict[str, Any]) -> Any:
    """Returns the error in `chunk`, in either of the shapes that servers use; None if none."""
    if chunk.get("choices") is not None:
        return None
    return chunk if chunk.get("object") == "error" else chunk.get("error")
