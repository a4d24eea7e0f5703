"""What comes from the client: its body, within a limit, and that it goes away."""

from collections.abc import Mapping

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from octet.errors import RequestError

__all__ = ["disconnected", "read_body"]


async def read_body(receive: Receive, headers: Mapping[bytes, bytes], limit: int) -> bytes:
    """The whole body. Raises RequestError (413) if it is larger than `limit` bytes.

    A Content-Length above the limit is refused before anything is read; a chunked body, which has
    none, as soon as it has grown past it. Raises ClientDisconnect if the client goes meanwhile.
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
    """Returns when the client has gone, or has its whole answer; after the body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _too_large(limit: int) -> RequestError:
    message = f"the body is larger than the limit of {limit} bytes"
    return RequestError(message, status=413, code="request_too_large")
