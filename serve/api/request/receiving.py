"""Receives from the client: its body, within a limit, and its disconnect."""

from collections.abc import Mapping

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from octet.errors import RequestError

__all__ = ["disconnected", "read_body"]


async def read_body(receive: Receive, headers: Mapping[bytes, bytes], limit: int) -> bytes:
    """Returns the whole body. Raises RequestError (413) if it is larger than `limit` bytes.

    A Content-Length above the limit is refused before anything is read. A chunked body, which has
    none, is refused as soon as it exceeds the limit. Raises ClientDisconnect if the client goes
    away meanwhile.
    """
    declared = headers.get(b"content-length", b"")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    pieces: list[bytes] = []
    received = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        pieces.append(piece := message.get("body", b""))
        received += len(piece)
        if received > limit:
            raise _too_large(limit)
        if not message.get("more_body"):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


async def disconnected(receive: Receive) -> None:
    """Returns when the client has gone, or has its whole answer. Call it after reading the body."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _too_large(limit: int) -> RequestError:
    message = f"the body is larger than the limit of {limit} bytes"
    return RequestError(message, status=413, code="request_too_large")
