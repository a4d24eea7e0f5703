"""Texts to calibrate with, read from a file; every complaint names the line.

A source is a function from a path to `Sample`s; JSON Lines is the one there is today. To add
another, write its reader and have `_reader_of` choose it.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from octet.errors import SampleError

__all__ = ["MINIMUM", "Sample", "SampleFile", "load_samples", "require_enough"]

MINIMUM = 128  # below this, calibration asks to be told that it is meant


@dataclass(frozen=True)
class Sample:
    """One text and where it came from, such as `line 12`."""

    text: str
    origin: str


@dataclass(frozen=True)
class SampleFile:
    """All samples of a source, in its order; `empty` counts those left out as having no text."""

    path: Path
    sha256: str
    samples: tuple[Sample, ...]
    empty: int

    def __len__(self) -> int:
        return len(self.samples)


Reader: TypeAlias = Callable[[Path, bytes, str], Iterator[Sample]]


def load_samples(path: Path, text_field: str = "text") -> SampleFile:
    """Raises SampleError, in one line, for anything but a readable source with some text in it."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise SampleError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise SampleError(f"{path}: is a directory; give a JSONL file") from None
    except OSError as error:
        raise SampleError(f"{path}: {error.strerror}") from None
    found = list(_reader_of(path)(path, content, text_field))
    samples = tuple(sample for sample in found if sample.text.strip())
    if not samples:
        what = f"all {len(found)} samples have an empty '{text_field}'" if found else "is empty"
        raise SampleError(f"{path}: {what}; one JSON object with a '{text_field}' per line")
    digest = hashlib.sha256(content).hexdigest()
    return SampleFile(path, digest, samples, empty=len(found) - len(samples))


def require_enough(path: Path, available: int, count: int, *, allow_few: bool) -> int:
    """How many samples to run; SampleError for fewer than `MINIMUM` unless `allow_few`."""
    chosen = min(available, count)
    if chosen < MINIMUM and not allow_few:
        what = f"--count {count}" if count < available else f"{path}: {available} samples"
        raise SampleError(
            f"{what}: calibration expects at least {MINIMUM}; give more, or add --allow-few-samples"
        )
    return chosen


def _reader_of(path: Path) -> Reader:
    return _read_jsonl


def _read_jsonl(path: Path, content: bytes, text_field: str) -> Iterator[Sample]:
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except ValueError as error:  # UnicodeDecodeError too
            detail = error.msg if isinstance(error, json.JSONDecodeError) else "not UTF-8"
            raise SampleError(
                f"{where}: not JSON ({detail}); each line must be one JSON object"
            ) from None
        if not isinstance(record, dict):
            raise SampleError(f"{where}: a JSON {_kind(record)}; each line must be an object")
        if text_field not in record:
            fields = ", ".join(record) or "none"
            raise SampleError(
                f"{where}: no field '{text_field}'; it has: {fields} (--text-field chooses)"
            )
        text = record[text_field]
        if not isinstance(text, str):
            raise SampleError(f"{where}: '{text_field}' is a JSON {_kind(text)}, not a string")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise SampleError(f"{where}: '{text_field}' holds a lone surrogate, no text") from None
        yield Sample(text, f"line {number}")


def _kind(value: object) -> str:
    """JSON's name for the type of a parsed value."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    names = {str: "string", int: "number", float: "number", list: "array", dict: "object"}
    return names[type(value)]
