"""Reads a shard once, from its mapped pages, and hashes it on another thread during encoding.

The hash covers the very pages that are encoded. Pages that have been both hashed and encoded are
released, so that a model of any size is exported in little memory.
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
        self._in_use = 0  # all bytes before this have been encoded
        self._asked = 0  # all bytes before this have been submitted for hashing
        self._hashed = 0
        self._released = 0
        self._waiting: deque[tuple[int, Future[None]]] = deque()  # each with the end of its part

    def expect(self, name: str, rows: int = 0) -> None:
        """Announces that a tensor is about to be encoded, and that `rows` of it already are.

        Calls in the file's order cost least.
        """
        start, stop = self.shard.span(name)
        if rows:
            start += (stop - start) // self.shard.shape(name)[0] * rows
        self._read(start, min(start + _PART, stop))

    def parts(self, name: str) -> Iterator[npt.NDArray[Any]]:
        """Yields the codes of a tensor that is copied, some rows at a time."""
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
        """Releases the memory of what has been hashed and encoded; it may still be read."""
        self._settle(_AHEAD)
        done = min(self._hashed, self._in_use)
        self.shard.advise("MADV_DONTNEED", self._released, done)
        self._released = max(done, self._released)

    def hexdigest(self) -> str:
        """Returns the hash of the whole file."""
        end = len(self.shard.contents)
        self._read(end, end)
        self._settle(0)
        self.release()
        return self._digest.hexdigest()

    def _read(self, start: int, stop: int) -> None:
        """Marks all before `start` as encoded, and submits the bytes up to `stop` to be hashed."""
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
