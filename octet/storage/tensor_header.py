"""Reads and writes the header of a safetensors file: its length in 8 bytes, then JSON."""

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from octet.errors import CheckpointError
from octet.storage.files import LFS_POINTER, MAX_JSON_BYTES, is_lfs_pointer, parse_json

__all__ = ["CONTAINERS", "Entry", "encode_header", "nbytes_of", "read_header"]

# safetensors dtype tag -> the numpy dtype of the codes that carry it
CONTAINERS: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "F8_E4M3": np.dtype("u1"),
    "F8_E5M2": np.dtype("u1"),
    "F8_E8M0": np.dtype("u1"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
_MAX_AXES = 32  # numpy's limit before release 2
_MAX_AXIS = 1 << 48
_MAX_NAME = 500  # characters


@dataclass(frozen=True)
class Entry:
    """One tensor; its data are the bytes from `start` to `stop` of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def nbytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Returns the number of bytes that a tensor takes in the file."""
    return math.prod(shape) * CONTAINERS[dtype].itemsize


def read_header(path: Path, file: BinaryIO) -> tuple[dict[str, Entry], dict[str, str] | None]:
    """Reads the tensors and the metadata (None if absent) of `file`, which is `path` just opened.

    Raises CheckpointError unless the tensors describe the rest of the file exactly.
    """
    size = os.fstat(file.fileno()).st_size
    if size < 8:
        raise CheckpointError(f"{path}: {size} bytes is no safetensors file; copy it again")
    (length,) = struct.unpack("<Q", file.read(8))
    if length > min(size - 8, MAX_JSON_BYTES):
        file.seek(0)
        if (other := _other_format(file.read(64))) is not None:
            raise CheckpointError(f"{path}: {other}")
        raise CheckpointError(
            f"{path}: its header claims {length} bytes in a file of {size}, of at most"
            f" {MAX_JSON_BYTES}: truncated or not safetensors; copy it again"
        )
    base = 8 + length
    try:
        parsed = parse_json(file.read(length))
        metadata = parsed.pop("__metadata__", None)
        entries = {_name(name): _entry(item, base) for name, item in parsed.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        detail = f" ({error})" if type(error) is ValueError else ""
        raise CheckpointError(
            f"{path}: the safetensors header is damaged{detail}; copy it again"
        ) from None
    _check(path, entries, base, size)
    return entries, metadata if isinstance(metadata, dict) else None


def _name(name: str) -> str:
    if len(name) > _MAX_NAME or not name.isprintable():  # messages show it
        raise ValueError(f"no name of a tensor: {name[:30]!r}")
    return name


def _entry(item: Mapping[str, Any], base: int) -> Entry:
    """Returns the entry of `item`, all of whose numbers are integers that numpy can represent."""
    dtype, shape, (start, stop) = item["dtype"], item["shape"], item["data_offsets"]
    numbers = [*shape[: _MAX_AXES + 1], start, stop]
    if not all(type(n) is int and 0 <= n < _MAX_AXIS for n in numbers):
        raise ValueError("sizes and offsets must be integers in range")
    if len(shape) > _MAX_AXES or math.prod(n or 1 for n in shape) >= 1 << 60:
        raise ValueError("the shape of a tensor is too large")
    return Entry(str(dtype)[:_MAX_NAME], tuple(shape), base + start, base + stop)


def _other_format(beginning: bytes) -> str | None:
    """Returns what a file is whose first bytes are those of another format."""
    if is_lfs_pointer(beginning):
        return LFS_POINTER
    if beginning.startswith(b"GGUF"):
        return "a GGUF file, not safetensors; give the Hugging Face checkpoint it was made from"
    if beginning.startswith(b"PK"):
        return "a PyTorch or ZIP file under another name, not safetensors; download it again"
    if beginning.lstrip().lower().startswith((b"<!doctype", b"<html")):
        return "a web page that was saved in place of the file; download it again"
    return None


def _check(path: Path, entries: Mapping[str, Entry], base: int, size: int) -> None:
    end = base
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.dtype not in CONTAINERS:
            raise CheckpointError(f"{path}: tensor {name} has the unknown dtype {entry.dtype}")
        expected = nbytes_of(entry.dtype, entry.shape)
        if entry.start != end or entry.stop - entry.start != expected:
            raise CheckpointError(f"{path}: tensor {name} does not fit its shape {entry.shape}")
        end = entry.stop
    if end != size:
        raise CheckpointError(
            f"{path}: the header describes {end} bytes, the file has {size}:"
            " truncated or altered; copy it again"
        )


def encode_header(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str] | None
) -> bytes:
    """Encodes the header of a file with contiguous `tensors`, given as dtype and shape."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        stop = offset + nbytes_of(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, stop]}
        offset = stop
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # so that the data begins at a multiple of 8
    return struct.pack("<Q", len(encoded)) + encoded
