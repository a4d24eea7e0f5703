"""Opens, limits and hashes files, and reads JSON, also as pydantic models.

Files of a checkpoint or artifact may come from anyone: one that could block or fill memory is
refused, by an OSError as for a file that is missing.

SHA-256 identifies a file, but takes longer than everything else that a streaming export does with
the bytes it reads. XXH3-128 costs almost nothing and detects damaged, truncated or exchanged files
as reliably; it does not detect deliberate forgery. It needs the optional `xxhash` package.
"""

import errno
import hashlib
import json
import os
import stat
import sys
from collections.abc import Callable, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ValidationError

from octet.errors import ArtifactError, OctetError

__all__ = [
    "LFS_POINTER",
    "MAX_JSON_BYTES",
    "MAX_TOKENIZER_BYTES",
    "XXH3",
    "Digest",
    "file_digests",
    "is_lfs_pointer",
    "open_file",
    "parse_json",
    "read_document",
    "read_file",
    "read_json",
    "read_object",
    "refuse_newer",
    "sha256_file",
    "xxh3",
]

XXH3 = "xxh3-128:"  # prefix of its checksums in hex; a SHA-256 has none
# Largest JSON file or safetensors header, enough for 150,000 tensors. Arrays, objects and keys take
# far more memory and time than their bytes, so at most one in 30 bytes of the limit is allowed.
MAX_JSON_BYTES = 32 << 20
_BYTES_PER_ITEM = 30
MAX_TOKENIZER_BYTES = 256 << 20  # of one tokenizer file; the largest known has 34 MB
_PART = 1 << 20  # bytes read at a time

# Text of an error, after the path of a file that Git LFS has not downloaded.
LFS_POINTER = "a Git LFS pointer, not the file itself: run `git lfs pull` in its directory"


def is_lfs_pointer(beginning: bytes) -> bool:
    """Returns True for the beginning of the file that Git leaves in place of a large one."""
    return beginning.startswith(b"version https://git-lfs.github.com/spec/")


def open_file(path: Path) -> BufferedReader:
    """Opens a regular file for reading; OSError for a FIFO or a device, which could block."""
    return open(path, "rb", opener=_open_regular)


def _open_regular(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind) or stat.S_ISDIR(kind):  # `open` itself refuses a directory
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "a FIFO or a device, not a file; copy the file there", path)


def read_file(path: Path, limit: int = MAX_JSON_BYTES) -> bytes:
    """Returns the bytes of a regular file; raises OSError if there are more than `limit`."""
    with open_file(path) as file:
        _require_size(path, os.fstat(file.fileno()).st_size, limit)
        content = file.read(limit + 1)
    _require_size(path, len(content), limit)
    return content


def _require_size(path: Path, size: int, limit: int) -> None:
    if size > limit:
        reason = f"larger than the {limit >> 20} MiB that such a file may have; copy it again"
        raise OSError(errno.EFBIG, reason, str(path))


def read_json(path: Path, limit: int = MAX_JSON_BYTES) -> Any:
    """Parses a JSON file; raises OSError as `read_file` and ValueError as `parse_json`."""
    return parse_json(read_file(path, limit), limit)


def read_object(path: Path, error: type[OctetError], limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Parses a JSON file that holds an object; raises `error`, one line, for any other file."""
    content = b""
    try:
        content = read_file(path, limit)
        data = parse_json(content, limit)
    except OSError as failed:
        raise error(f"{path}: {failed.strerror}") from None
    except ValueError as failed:
        if is_lfs_pointer(content):
            raise error(f"{path}: {LFS_POINTER}") from None
        raise error(f"{path}: not valid JSON ({failed}); copy it again") from None
    if not isinstance(data, dict):
        raise error(f"{path}: expected a JSON object; copy it again")
    return data


def parse_json(content: bytes, limit: int = MAX_JSON_BYTES) -> Any:
    """Parses UTF-8 JSON; raises ValueError, one line, for anything that parsers read differently.

    That includes a key with two values, of which Python takes the last and others the first.
    """
    if sum(map(content.count, (b"[", b"{", b":"))) > limit // _BYTES_PER_ITEM:
        raise ValueError(f"more than {limit // _BYTES_PER_ITEM:,} arrays, objects and keys")
    try:
        return json.loads(content.decode(), object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError as error:  # Python's advice for long numbers follows a semicolon
        raise ValueError(str(error).partition(";")[0]) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        for key, value in pairs:
            if found[key] != value:
                raise ValueError(f"key {key!r} has two values")
    return found


class Digest(Protocol):
    """The interface of hashlib's hash objects."""

    def update(self, data: bytes | bytearray | memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


class _Xxh3:
    """XXH3-128, with a prefix in its hex digest."""

    def __init__(self, inner: Digest) -> None:
        self.update = inner.update
        self._inner = inner

    def hexdigest(self) -> str:
        return XXH3 + self._inner.hexdigest()


def xxh3() -> Digest | None:
    """Returns a new XXH3-128 object; None without the `xxhash` package."""
    try:
        import xxhash
    except ImportError:  # the extras `calibrate` and `export` have it
        return None
    return _Xxh3(xxhash.xxh3_128())


def file_digests(
    path: Path,
    inspect: Callable[[int, memoryview], None] = lambda offset, part: None,
    cuts: Sequence[int] = (),
) -> tuple[str, str | None]:
    """Reads a file once; returns its SHA-256 and its XXH3-128 (None without `xxhash`).

    Calls `inspect` with the offset and the bytes of each part. A new part begins at every offset in
    `cuts`, which ascend, and 1 MiB after the last one began.
    """
    sha256, fast = hashlib.sha256(), xxh3()
    buffer = memoryview(bytearray(_PART))
    offset = 0
    with open_file(path) as file:
        for cut in (*cuts, sys.maxsize):
            while size := file.readinto(buffer[: min(_PART, cut - offset)]):
                part = buffer[:size]
                sha256.update(part)
                if fast is not None:
                    fast.update(part)
                inspect(offset, part)
                offset += size
    return sha256.hexdigest(), None if fast is None else fast.hexdigest()


def sha256_file(path: Path) -> str:
    """Returns the SHA-256 of a file's bytes, in hex; OSError for JSON that nothing would read."""
    with open_file(path) as file:
        if path.suffix == ".json":  # read whole later: hashing more would only take time
            _require_size(path, os.fstat(file.fileno()).st_size, MAX_TOKENIZER_BYTES)
        return hashlib.file_digest(file, "sha256").hexdigest()


Document = TypeVar("Document", bound=BaseModel)


def read_document(path: Path, kind: type[Document], what: str) -> Document:
    """Reads JSON as a `kind`, which has a `schema_version`; `what` describes it in messages.

    Raises ArtifactError, one line, for a file that is unreadable, invalid or newer than this Octet.
    """
    try:
        data = read_json(path)
        if isinstance(data, dict):
            known = kind.model_fields["schema_version"].default
            refuse_newer(path, data.get("schema_version"), known)
        return kind.model_validate(data)
    except OSError as error:
        raise ArtifactError(f"{path}: {error.strerror}") from None
    except (ValueError, ValidationError) as error:
        detail = str(error).splitlines()[0]
        raise ArtifactError(f"{path}: not {what} ({detail})") from None


def refuse_newer(path: Path, version: object, known: int) -> None:
    """Raises ArtifactError if `version`, the schema version of the file, is above `known`."""
    if isinstance(version, int) and version > known:
        raise ArtifactError(
            f"{path}: schema version {version}, written by a newer Octet; this one reads up to"
            f" {known}: pip install -U octet-llm"
        )
