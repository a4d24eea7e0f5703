"""Ports of this machine that nobody else gets while no server listens on them."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["reserved_port"]


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port of 127.0.0.1 that is bound, and listens only while a server in the block does.

    The kernel hands it out to no process that asks for any port, and refuses connections to it. A
    server can listen on it, and again after it has stopped: with SO_REUSEADDR, which all of them
    set, a socket that does not listen is in nobody's way.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
