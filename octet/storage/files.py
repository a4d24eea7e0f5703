"""Hashes files, and reads JSON documents as pydantic models.

SHA-256 identifies a file, but takes longer than everything else that a streaming export does with
the bytes it reads. XXH3-128 costs almost nothing and detects damaged, truncated or exchanged files
as reliably; it does not detect deliberate forgery. It needs the optional `xxhash` package.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from pydantic import BaseModel, ValidationError

from octet.errors import ArtifactError

__all__ = [
    "LFS_POINTER",
    "XXH3",
    "Digest",
    "file_digests",
    "is_lfs_pointer",
    "read_document",
    "refuse_newer",
    "sha256_file",
    "xxh3",
]

XXH3 = "xxh3-128:"  # prefix of its checksums in hex; a SHA-256 has none
_PART = 1 << 20  # bytes read at a time

# Follows the path of a file that Git has not downloaded.
LFS_POINTER = "a Git LFS pointer, not the file itself: run `git lfs pull` in its directory"


def is_lfs_pointer(beginning: bytes) -> bool:
    """Returns True for the beginning of the file that Git leaves in place of a large one."""
    return beginning.startswith(b"version https://git-lfs.github.com/spec/")


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
    with path.open("rb") as file:
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
    """Returns the SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


Document = TypeVar("Document", bound=BaseModel)


def read_document(path: Path, kind: type[Document], what: str) -> Document:
    """Reads JSON as a `kind`, which has a `schema_version`; `what` describes it in messages.

    Raises ArtifactError, one line, for a file that is unreadable, invalid or newer than this Octet.
    """
    try:
        data = json.loads(path.read_text("utf-8"))
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
