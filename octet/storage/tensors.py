"""Safetensors files without a framework: read by memory map, written in one pass.

The `safetensors` package's numpy binding has no float8 and needs another package for bfloat16, so a
tensor here is a dtype tag and an array of codes: uint16 for BF16, uint8 for FP8.
"""

import hashlib
import mmap
from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from octet.errors import CheckpointError
from octet.numerics import formats
from octet.numerics.bits import bf16_to_float32, float32_to_bf16
from octet.storage.files import file_digests, open_file
from octet.storage.tensor_header import CONTAINERS, Entry, encode_header, nbytes_of, read_header

__all__ = [
    "PendingTensor",
    "Tensor",
    "TensorFile",
    "pending",
    "tensors_nbytes",
    "write_tensors",
]

_PART = 8 << 20  # bytes per write and hash update
_WAITING_PARTS = 8
_RELEASE_EVERY = 64 << 20


@dataclass(frozen=True)
class Tensor:
    """A stored tensor: `dtype` is safetensors' tag, `codes` the array in its container dtype."""

    dtype: str
    codes: npt.NDArray[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    def float32(self) -> npt.NDArray[np.float32]:
        """Returns the values, exactly (every floating tag except F64 fits in float32)."""
        match self.dtype:
            case "BF16":
                return bf16_to_float32(self.codes)
            case "F8_E4M3":
                return formats.decode(self.codes, formats.E4M3)
            case "F8_E5M2":
                return formats.decode(self.codes, formats.E5M2)
            case "F8_E8M0":
                return formats.decode(self.codes, formats.E8M0)
            case _:
                return self.codes.astype(np.float32)

    def times_power(self, power: int) -> "Tensor":
        """Returns 2^power times a tensor of a floating dtype that is not quantized, in its dtype.

        Exact if `holds_power`; otherwise rounded, or infinite.
        """
        if self.dtype == "F64":
            return Tensor("F64", self.codes * 2.0**power)
        with np.errstate(over="ignore", under="ignore"):
            values = self.float32() * np.float32(2.0**power)
            if self.dtype == "BF16":
                return Tensor("BF16", float32_to_bf16(values))
            return Tensor(self.dtype, values.astype(self.codes.dtype))

    def holds_power(self, power: int) -> bool:
        """Returns whether every element times 2^power is in the range of the dtype, to the bit."""
        back = self.times_power(power).times_power(-power)
        return np.array_equal(back.codes, self.codes)

    @classmethod
    def of(cls, array: npt.NDArray[Any]) -> Self:
        """Wraps an array of a dtype that numpy itself has."""
        for tag, container in CONTAINERS.items():
            if container == array.dtype and not tag.startswith(("BF", "F8")):
                return cls(tag, array)
        raise TypeError(f"no safetensors dtype for numpy's {array.dtype}")


@dataclass(frozen=True)
class PendingTensor:
    """A tensor to be written, whose codes are computed only when it is written.

    `parts` yields them a number of whole rows at a time; `read` returns all at once.
    """

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], npt.NDArray[Any]]
    parts: Callable[[], Iterator[npt.NDArray[Any]]] | None = None

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.dtype, self.shape)


class TensorFile:
    """One safetensors file, mapped; its header has been checked against the file's size."""

    def __init__(
        self,
        path: Path,
        entries: dict[str, Entry],
        buffer: mmap.mmap | bytes,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.path = path
        self.metadata = metadata or {}  # texts that the writer put into the header
        self._entries = entries
        self._buffer = buffer
        self._digests: tuple[str, str | None] | None = None

    @classmethod
    def open(cls, path: Path) -> Self:
        """Maps a file; CheckpointError if it is truncated or its header is not valid."""
        try:
            with open_file(path) as file:
                entries, metadata = read_header(path, file)
                buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from None
        return cls(path, entries, buffer, metadata)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def dtype(self, name: str) -> str:
        return self._entries[name].dtype

    def span(self, name: str) -> tuple[int, int]:
        """Returns the offsets in the file at which the tensor's bytes start and stop."""
        return self._entries[name].start, self._entries[name].stop

    @property
    def contents(self) -> memoryview:
        """The whole mapped file."""
        return memoryview(self._buffer)

    @property
    def digests(self) -> tuple[str, str | None]:
        """SHA-256 and XXH3-128 (None without `xxhash`) of the file, which is read once for them."""
        if self._digests is None:
            self._digests = file_digests(self.path)
        return self._digests

    @digests.setter
    def digests(self, known: tuple[str, str | None]) -> None:
        self._digests = known

    def scan(self, inspect: Callable[[str, Tensor], None], advance: Callable[[int], None]) -> None:
        """Reads the file once for its `digests`, and calls `inspect` with parts of its tensors.

        A part is one-dimensional, and valid only during the call. `advance` receives numbers of
        bytes, which add up to the file's size.
        """
        tensors = sorted(self._entries.items(), key=lambda item: (item[1].start, item[1].stop))
        starts = [entry.start for _, entry in tensors]

        def inspect_part(offset: int, part: memoryview) -> None:
            at = bisect(starts, offset) - 1
            if at >= 0:  # after the header
                name, entry = tensors[at]
                inspect(name, Tensor(entry.dtype, np.frombuffer(part, CONTAINERS[entry.dtype])))
            advance(len(part))

        self._digests = file_digests(self.path, inspect_part, starts)

    def read(self, name: str) -> Tensor:
        """Returns the tensor, as a read-only view of the mapped file."""
        entry = self._entries[name]
        container = CONTAINERS[entry.dtype]
        count = (entry.stop - entry.start) // container.itemsize
        codes = np.frombuffer(self._buffer, container, count, entry.start)
        return Tensor(entry.dtype, codes.reshape(entry.shape))

    def read_into(self, name: str, buffer: memoryview) -> None:
        """Reads the tensor's bytes into `buffer` of their size, without mapping its pages.

        Several threads can read at a time. CheckpointError if the file has become shorter.
        """
        entry = self._entries[name]
        done = 0
        with open_file(self.path) as file:
            file.seek(entry.start)
            while done < len(buffer) and (count := file.readinto(buffer[done:])):
                done += count
        if done < entry.stop - entry.start:
            raise CheckpointError(f"{self.path}: {name} ends early; the file has changed")

    def release(self) -> None:
        """Drops the mapped pages from memory; views stay valid and reload them when read."""
        self.advise("MADV_DONTNEED", 0, len(self._buffer))

    def advise(self, advice: str | int, start: int, stop: int) -> None:
        """Calls madvise(2), if available, on the pages from byte `start` to `stop`."""
        code = getattr(mmap, advice, None) if isinstance(advice, str) else advice
        start -= start % mmap.PAGESIZE
        if isinstance(self._buffer, mmap.mmap) and code is not None and start < stop:
            self._buffer.madvise(code, start, stop - start)


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor | PendingTensor],
    metadata: Mapping[str, str] | None = None,
    *,
    release: Callable[[], None] | None = None,
) -> str:
    """Writes one safetensors file, tensors in the order given; returns its SHA-256 in hex.

    A `PendingTensor`, or a part of it, is in memory only while it is written. `release` is called
    every 64 MiB, so that a mapped source can drop its pages. A second thread hashes the bytes while
    they are written, so the file is not read again.
    """
    planned = {name: pending(tensor) for name, tensor in tensors.items()}
    digest = hashlib.sha256()
    waiting: deque[Future[None]] = deque()  # parts to be hashed, in memory until then
    since_release = 0
    with path.open("wb") as file, ThreadPoolExecutor(1) as hashing:
        for codes in _contents(planned, metadata):
            data = np.ascontiguousarray(codes).reshape(-1).view(np.uint8).data
            for start in range(0, len(data), _PART):
                part = data[start : start + _PART]
                # Neither hashing nor writing holds the GIL.
                waiting.append(hashing.submit(digest.update, part))
                file.write(part)
                if len(waiting) > _WAITING_PARTS:
                    waiting.popleft().result()
                since_release += len(part)
                if release is not None and since_release >= _RELEASE_EVERY:
                    release()
                    since_release = 0
            del codes, data
        for hashed in waiting:
            hashed.result()
    if release is not None:
        release()
    return digest.hexdigest()


def tensors_nbytes(
    tensors: Mapping[str, Tensor | PendingTensor],
    metadata: Mapping[str, str] | None = None,
    *,
    header: bool = True,
) -> int:
    """Returns the bytes that `write_tensors` would write; without `header`, of the data alone."""
    planned = {name: pending(tensor) for name, tensor in tensors.items()}
    nbytes = sum(tensor.nbytes for tensor in planned.values())
    return nbytes + (len(_header(planned, metadata)) if header else 0)


def _header(planned: Mapping[str, PendingTensor], metadata: Mapping[str, str] | None) -> bytes:
    return encode_header({name: (x.dtype, x.shape) for name, x in planned.items()}, metadata)


def _contents(
    planned: Mapping[str, PendingTensor], metadata: Mapping[str, str] | None
) -> Iterator[npt.NDArray[Any]]:
    """Yields the contents of a file in order: its header, and the codes of each tensor."""
    yield np.frombuffer(_header(planned, metadata), np.uint8)
    for name, tensor in planned.items():
        rows = 0
        for codes in (tensor.read(),) if tensor.parts is None else tensor.parts():
            rows += len(codes) if codes.ndim else 0
            if codes.shape[1:] != tensor.shape[1:] or codes.dtype != CONTAINERS[tensor.dtype]:
                raise RuntimeError(f"{name}: {codes.dtype} {codes.shape} is not what was announced")
            yield codes
        if tensor.shape and rows != tensor.shape[0]:
            raise RuntimeError(f"{name}: {rows} rows are not those of {tensor.shape}")


def pending(tensor: Tensor | PendingTensor) -> PendingTensor:
    """Returns `tensor` as a PendingTensor."""
    if isinstance(tensor, PendingTensor):
        return tensor
    return PendingTensor(tensor.dtype, tensor.shape, lambda: tensor.codes)
