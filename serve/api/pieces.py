"""What the pieces of a stream tell without being parsed: they may be one event, or many."""

import re

__all__ = ["ended_in", "events_in", "is_comment"]

_FINISHED = re.compile(rb'"finish_reason"\s*:\s*"')


def is_comment(piece: bytes) -> bool:
    """Whether there are no data in it: servers write comments to keep a connection open."""
    return piece.startswith(b":") and b"\ndata:" not in piece


def ended_in(piece: bytes) -> int:
    """Choices that say how they ended."""
    return len(_FINISHED.findall(piece))


def events_in(piece: bytes) -> int:
    """Events with tokens: neither `[DONE]` nor the usage."""
    events = piece.count(b"\n\n") or piece.count(b"\r\n\r\n")
    if b"[DONE]" in piece[-20:]:
        events -= 1
    if b'"choices":[]' in piece:
        events -= 1
    return max(events, 0)
