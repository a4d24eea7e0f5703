"""Server-sent events with names, as Responses and Messages have them.

Each event has a line `event: NAME`, and the same name as `type` in its data. The line is read,
because text of a client or a model cannot imitate it; the data is read only if a server leaves the
line out.
"""

import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from octet.errors import BackendError
from serve.api.events import (
    EventReader,
    Rewrite,
    data_lines,
    is_object,
    json_object,
    lost_by_abort,
    occurrences,
    read_large_usage,
    read_usage,
    rewritten,
    split_events,
)
from serve.backends.bounds import MAX_EVENT, MAX_EVENTS, MAX_PREAMBLE, PARSED

__all__ = ["MESSAGES", "RESPONSES", "NamedEventReader", "Names", "deltas_in", "require_reason"]

_NAME = re.compile(rb"^event:[ \t]*([\w.]{1,64})[ \t\r]*$", re.MULTILINE)
_DELTA = re.compile(rb'"type"\s*:\s*"(?:content_block_delta|response\.[a-z_.]{1,48}\.delta)"')
_REASON = re.compile(rb'"stop_reason"\s*:\s*"')
_FAILED = ("error", "response.failed")
_REPEATED = 8  # times a request's size: two events repeat it, and escapes make it longer


@dataclass(frozen=True, slots=True)
class Names:
    """The events of one protocol, by name."""

    opening: frozenset[str]  # sent before any token
    last: tuple[str, ...]  # one of them ends a stream
    usage: Mapping[str, str]  # event -> its field that holds `usage`; "" if the event itself does
    counted: tuple[str, ...]  # those of `usage` after which the counts are complete
    has_reason: bool  # a complete answer has a `stop_reason`; one that the server aborted has none


RESPONSES = Names(
    opening=frozenset(
        f"response.{name}"
        for name in (
            *("created", "in_progress", "queued", "output_item.added", "content_part.added"),
            *("reasoning_part.added", "reasoning_summary_part.added"),
        )
    ),
    last=("response.completed", "response.incomplete", "response.failed"),
    usage={f"response.{name}": "response" for name in ("completed", "incomplete", "failed")},
    counted=("response.completed", "response.incomplete", "response.failed"),
    has_reason=False,
)
MESSAGES = Names(
    opening=frozenset(("message_start", "content_block_start", "ping")),
    last=("message_stop",),
    usage={"message_start": "message", "message_delta": ""},
    counted=("message_delta",),
    has_reason=True,
)


def deltas_in(piece: bytes) -> int:
    """Counts the events with tokens in a piece of a stream."""
    return len(_DELTA.findall(piece))


class NamedEventReader(EventReader):
    """Reads one stream as `EventReader` does; its last event has one of the names in `last`."""

    def __init__(
        self,
        name: str,
        body: AsyncIterator[bytes],
        rewrite: Rewrite | None,
        names: Names,
        request_size: int,
    ) -> None:
        """`request_size` is that of the body, in bytes: events before the first token repeat it."""
        super().__init__(name, body, rewrite)
        self.last = names.last[0]
        self.max_preamble = MAX_PREAMBLE + min(_REPEATED * request_size, MAX_EVENT)
        self._names = names
        self._usage: dict[str, Any] = {}

    def _is_last(self, event: bytes) -> bool:
        return False  # clients drop an event without its blank line

    def _read(self, events: bytes) -> bytes:
        read = 0
        for number, event in enumerate(split_events(events)):
            if number >= MAX_EVENTS:
                raise self._garbled(f"sent more than {MAX_EVENTS} events at once")
            self._note(_name_of(event), event)
            if self._aborted:
                break
            read += len(event)
            if self.tally.ended:
                break
        events = events[:read]
        return events if self._rewrite is None else self._rewrite(events)

    def _note(self, name: str, event: bytes) -> None:
        """Records what an event of at most `PARSED` bytes means for the answer."""
        if name:
            self.tally.events += 1
        if name in self._names.usage:
            self._note_usage(name, json_object(b"\n".join(data_lines(event))))
        if name in _FAILED or (not name and b'"error"' in event):
            self._note_error(event)
        self.tally.ended = self.tally.ended or name in self._names.last

    def _note_usage(self, name: str, event: dict[str, Any]) -> None:
        """Records the usage in an event; in Messages, also whether the server aborted."""
        field = self._names.usage[name]
        found = event.get(field) if field else event
        usage = found.get("usage") if isinstance(found, dict) else None
        if isinstance(usage, dict):  # the last event may leave out what the first one had
            self._usage |= {key: value for key, value in usage.items() if value is not None}
        if name not in self._names.counted:
            return
        read_usage({"usage": self._usage or None}, self.tally)
        if self._names.has_reason:
            delta = event.get("delta")
            self._aborted = isinstance(delta, dict) and delta.get("stop_reason", "") is None

    async def _read_long(self, event: bytes) -> bytes:
        name = _name_of(event)
        self.tally.events += 1
        if name in self._names.counted:
            await read_large_usage(event, self.tally)
        if name in _FAILED:
            self.tally.failed = BackendError(f"{self._name}: failed while answering")
        self.tally.ended = name in self._names.last
        return await rewritten(event, self._rewrite)

    def _has_content(self, events: bytes) -> bool:
        if len(events) > PARSED:  # a single event, which is not parsed
            if self.tally.failed is not None:
                raise self.tally.failed
            if not is_object(events.partition(b"data:")[2][:PARSED], events[-PARSED:]):
                raise self._garbled("sent an event that is no JSON object")
            return _name_of(events) not in self._names.opening
        for event in split_events(events):
            lines = data_lines(event)
            if not lines:
                continue
            self._chunk(b"\n".join(lines))  # raises an error if it is invalid or reports one
            if _name_of(event) not in self._names.opening:
                return True
        return False


async def require_reason(name: str, body: bytes) -> None:
    """Raises BackendError if a whole answer lacks a `stop_reason`: its server aborted it."""
    found = await occurrences(body, b'"stop_reason"')
    if not any(_REASON.match(body, at) for at in found):
        raise lost_by_abort(name)


def _name_of(event: bytes) -> str:
    """Returns the name of an event; "" if it has none."""
    found = _NAME.search(event[: max(event.find(b"data:"), 0)])  # the data may have 8 MB
    if found is not None:
        return found[1].decode()
    if len(event) > PARSED or b'"type"' not in event:
        return ""
    name = json_object(b"\n".join(data_lines(event))).get("type")
    return name if isinstance(name, str) else ""
