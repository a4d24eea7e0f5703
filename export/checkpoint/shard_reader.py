"""Reads a shard once, from its mapped pages: hashed by another thread while it is encoded.

The hash is of the very pages that are encoded. What both are done with is let go of, so that a
model of any size is exported in little memory.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import Any

import numpy.typing as npt

from octet.storage.files import Digest
from octet.storage.tensors import TensorFile

__all__ = ["ShardReader"]

_PART = 8 << 20  # bytes mapped and hashed together
_AHEAD = 64 << 20  # bytes that may wait to be hashed
_POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14: maps many pages at once, and cheaply


class ShardReader:
    """Feeds a shard's file to `digest`, on `executor`, as far as it has been read."""

    def __init__(self, shard: TensorFile, digest: Digest, executor: Executor) -> None:
        self.shard = shard
        self._executor = executor
        self._digest = digest
        self._in_use = 0  # before this, all has been encoded
        self._asked = 0  # before this, all has been given to be hashed
        self._hashed = 0
        self._released = 0
        self._waiting: deque[tuple[int, Future[None]]] = deque()  # where each part ends

    def expect(self, name: str, rows: int = 0) -> None:
        """Tells that a tensor is about to be encoded, of which `rows` have been already.

        Calls in the file's order cost least.
        """
        start, stop = self.shard.span(name)
        if rows:
            start += (stop - start) // self.shard.shape(name)[0] * rows
        self._read(start, min(start + _PART, stop))

    def parts(self, name: str) -> Iterator[npt.NDArray[Any]]:
        """The codes of a tensor that is copied, some rows at a time."""
        codes = self.shard.read(name).codes
        start, stop = self.shard.span(name)
        if codes.ndim == 0 or stop == start:
            self._read(start, stop)
            yield codes
            return
        row = (stop - start) // len(codes)
        step = max(1, _PART // row)
        for first in range(0, len(codes), step):
            last = min(first + step, len(codes))
            self._read(start + first * row, start + last * row)
            yield codes[first:last]

    def release(self) -> None:
        """Lets go of what has been hashed and encoded, in memory; it may still be read."""
        self._settle(_AHEAD)
        done = min(self._hashed, self._in_use)
        self.shard.advise("MADV_DONTNEED", self._released, done)
        self._released = max(done, self._released)

    def hexdigest(self) -> str:
        """The hash of the whole file."""
        end = len(self.shard.contents)
        self._read(end, end)
        self._settle(0)
        self.release()
        return self._digest.hexdigest()

    def _read(self, start: int, stop: int) -> None:
        """All before `start` has been encoded; what follows until `stop` is next."""
        self._in_use = max(start, self._in_use)
        contents = self.shard.contents
        while self._asked < stop:
            first, self._asked = self._asked, min(self._asked + _PART, stop)
            with suppress(OSError):  # older kernels and other systems map pages one by one
                self.shard.advise(_POPULATE_READ, first, self._asked)
            part = self._executor.submit(self._digest.update, contents[first : self._asked])
            self._waiting.append((self._asked, part))

    def _settle(self, ahead: int) -> None:
        """Waits until no more than `ahead` bytes have yet to be hashed."""
        while self._waiting:
            end, part = self._waiting[0]
            if not part.done() and self._asked - self._hashed <= ahead:
                return
            part.result()
            self._hashed = end
            self._waiting.popleft()
