"""Holds the held-out samples as token ids, the same for every target that is compared."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from octet.errors import SampleError
from octet.storage.files import sha256_file
from verify.evaluation.target import digest_of

__all__ = ["Sequences", "read_texts"]


@dataclass(frozen=True)
class Sequences:
    """Samples of two tokens or more, cut at `max_length`, in the order of the file."""

    path: Path
    sha256: str
    max_length: int
    origins: tuple[str, ...]
    texts: tuple[str | None, ...]  # None: a conversation, rendered by a template
    ids: tuple[tuple[int, ...], ...]
    digests: tuple[str, ...]

    @classmethod
    def of(
        cls,
        path: Path,
        sha256: str,
        samples: Iterable[tuple[str, str | None, list[int]]],
        *,
        max_length: int,
    ) -> Self:
        """Builds from (origin, text, token ids). Raises SampleError if no sample has two tokens."""
        kept = [
            (origin, text, tuple(ids[:max_length])) for origin, text, ids in samples if len(ids) > 1
        ]
        if not kept:
            raise SampleError(f"{path}: no sample has two tokens, so none predicts anything")
        origins, texts, ids = zip(*kept, strict=True)
        return cls(path, sha256, max_length, origins, texts, ids, tuple(map(digest_of, ids)))

    @property
    def tokens(self) -> int:
        """Number of predicted tokens: all but the first of each sample."""
        return sum(len(ids) - 1 for ids in self.ids)

    @property
    def highest(self) -> int:
        return max(map(max, self.ids))


def read_texts(
    path: Path,
    encode: Callable[[str], list[int]],
    *,
    count: int | None = None,
    text_field: str = "text",
    max_length: int,
) -> Sequences:
    """Encodes the first `count` texts of a JSONL file that are not blank (all if None).

    Raises SampleError, naming the line, for a file that is missing or malformed.
    """
    texts = list(_texts(path, text_field))[:count]
    samples = ((origin, text, encode(text)) for origin, text in texts)
    return Sequences.of(path, sha256_file(path), samples, max_length=max_length)


def _texts(path: Path, field: str) -> Iterator[tuple[str, str]]:
    """Yields (origin, text) of each line that is not blank."""
    try:
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise SampleError(f"{path}: {reason}") from None
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)[field]
        except (ValueError, KeyError, TypeError):
            raise SampleError(
                f"{path}, line {number}: not a JSON object with the field '{field}'"
                " (--text-field chooses)"
            ) from None
        if not isinstance(text, str):
            raise SampleError(f"{path}, line {number}: '{field}' is not a string")
        if text.strip():
            yield f"{path.name}, line {number}", text
