"""Delays Ctrl-C and SIGTERM where a library would not survive them."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["held_back"]


@contextmanager
def held_back() -> Iterator[None]:
    """Delays SIGINT and SIGTERM to the end of the block, then raises KeyboardInterrupt for them.

    For imports: an exception that a signal raises inside torch's initialisation aborts the process
    with a page of C++ output.
    """
    if threading.current_thread() is not threading.main_thread():  # it alone can set handlers
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
