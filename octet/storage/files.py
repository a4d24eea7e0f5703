"""Hashes of files: SHA-256, which identifies one, and XXH3-128, which shows an accident.

SHA-256 takes longer than all else that a streaming export does with what it reads. XXH3-128 takes
next to nothing, and tells a damaged, truncated or exchanged file as surely; only of one that was
forged on purpose it tells nothing. It is the `xxhash` package's, where that is installed.

Reading a JSON file as a pydantic model, with one line for what is wrong with it.
"""

import hashlib
import json
from pathlib import Path
from typing import Protocol, TypeVar

from pydantic import BaseModel, ValidationError

from octet.errors import ArtifactError

__all__ = ["XXH3", "Digest", "file_digests", "read_document", "sha256_file", "xxh3"]

XXH3 = "xxh3-128:"  # begins a checksum in hex; a SHA-256 is bare
_PART = 1 << 20  # bytes read at a time


class Digest(Protocol):
    """What hashlib's objects are."""

    def update(self, data: bytes | bytearray | memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


class _Xxh3:
    """XXH3-128, whose hex says what it is."""

    def __init__(self, inner: Digest) -> None:
        self.update = inner.update
        self._inner = inner

    def hexdigest(self) -> str:
        return XXH3 + self._inner.hexdigest()


def xxh3() -> Digest | None:
    """An XXH3-128 of nothing yet; None without the `xxhash` package."""
    try:
        import xxhash
    except ImportError:  # the extras `calibrate` and `export` have it
        return None
    return _Xxh3(xxhash.xxh3_128())


def file_digests(path: Path) -> tuple[str, str | None]:
    """The SHA-256 and the XXH3-128 (None without `xxhash`) of a file, read once."""
    sha256, fast = hashlib.sha256(), xxh3()
    buffer = memoryview(bytearray(_PART))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            sha256.update(buffer[:size])
            if fast is not None:
                fast.update(buffer[:size])
    return sha256.hexdigest(), None if fast is None else fast.hexdigest()


def sha256_file(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


Document = TypeVar("Document", bound=BaseModel)


def read_document(path: Path, kind: type[Document], what: str) -> Document:
    """The content of `path`. ArtifactError if it cannot be read, or is not `what` it should be."""
    try:
        return kind.model_validate(json.loads(path.read_text()))
    except OSError as error:
        raise ArtifactError(f"{path}: {error.strerror}") from None
    except (ValueError, ValidationError) as error:
        detail = str(error).splitlines()[0]
        raise ArtifactError(f"{path}: not {what} ({detail})") from None
