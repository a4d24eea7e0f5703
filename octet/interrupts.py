"""Ctrl-C and SIGTERM held back where a library would not survive them."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["held_back"]


@contextmanager
def held_back() -> Iterator[None]:
    """SIGINT and SIGTERM wait for the end of the block, and are KeyboardInterrupt then.

    For imports: an exception that a signal raises inside torch's initialisation ends the process
    with an abort and a page of C++.
    """
    if threading.current_thread() is not threading.main_thread():  # handlers are the main thread's
        yield
        return
    received: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {n: signal.signal(n, lambda number, frame: received.append(number)) for n in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        raise KeyboardInterrupt
