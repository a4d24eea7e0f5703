"""Decides whether this process is about to run out of memory."""

import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

from octet.hardware.memory import memory_limit

__all__ = ["Memory"]

READ_EVERY_S = 0.25
READ_EVERY_BYTES = 1024 * 1024  # of bodies that arrive
DECODED = 2  # times a body's size: its text, and what is decoded from it
PART_OF_CGROUP = 0.8

_log = logging.getLogger(__name__)


class Memory:
    """Compares this process's resident size with its limit; an unknown value never refuses."""

    def __init__(
        self,
        limit: int | None = None,
        *,
        processes: int = 1,
        clock: Callable[[], float] = time.monotonic,
        root: Path = Path("/"),
    ) -> None:
        """`limit` is in bytes; None takes 80 % of the cgroup's limit, if it has one.

        Both are shared by `processes` alike.
        """
        self._clock = clock
        self._statm = root / "proc/self/statm"
        self.page_bytes = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
        if limit is None and (most := memory_limit(root)) is not None:
            limit = int(most * PART_OF_CGROUP)
        self.limit = limit and limit // processes
        self._next_read = -math.inf
        self._used: int | None = None
        self._unread = 0  # bytes that have arrived since the last reading
        self.arriving = 0  # bytes of bodies that are not decoded yet

    def is_short(self) -> bool:
        """Decides whether the limit is reached, also by what decoding the bodies will take.

        Reads at most every 0.25 s, but at every megabyte of a body.
        """
        if self.limit is None:
            return False
        return (self.used or 0) + DECODED * self.arriving >= self.limit

    def arrived(self, size: int) -> None:
        """Counts bytes of a body; negative when it is decoded, or refused."""
        self.arriving += size
        self._unread += abs(size)
        if self._unread >= READ_EVERY_BYTES:
            self._next_read = -math.inf

    @property
    def used(self) -> int | None:
        """Resident bytes, read at most 0.25 s ago; None if the system does not report them."""
        now = self._clock()
        if now >= self._next_read:
            self._next_read = now + READ_EVERY_S
            self._unread = 0
            self._used = self._read()
        return self._used

    def warn(self) -> None:
        """Logs a warning if the limit is reached before any request."""
        if self.is_short():
            _log.warning(
                "limits.max_memory_bytes is %s, but the process has %s already: one request at a "
                "time is served",
                self.limit,
                self.used,
            )

    def _read(self) -> int | None:
        try:
            # proc(5): size, resident, shared, ... in pages
            return int(self._statm.read_bytes().split()[1]) * self.page_bytes
        except (OSError, ValueError, IndexError):
            return None  # not Linux
