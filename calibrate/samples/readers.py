"""Reads samples from files and directories: one reader for each kind of source.

`open_source` chooses by what the path is: a directory that `datasets.save_to_disk` wrote, another
directory of text, JSONL or Parquet files, a Parquet file, a text file; any other file is JSONL.
Readers yield samples as they read, so that the first few of a large file cost little.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from calibrate.samples.parquet import read_arrow, read_parquet, shards
from calibrate.samples.sample import Fields, Sample, kind_of, sample_of
from octet.errors import SampleError

__all__ = ["Source", "open_source"]

_BOM = b"\xef\xbb\xbf"
_PIECE = 1 << 20  # bytes searched at once


@dataclass(frozen=True)
class Source:
    """A source of samples.

    `files` are in the order they are read; `read` starts from the beginning each time.
    """

    kind: str  # for people, and for the manifest
    files: tuple[Path, ...]
    read: Callable[[], Iterator[Sample]]


def open_source(path: Path, fields: Fields) -> Source:
    """Opens the source at `path`. Raises SampleError, in one line, for a path that is none."""
    with _reading(path):
        path.stat()
    if path.is_dir():
        return _open_directory(path, fields)
    if not path.is_file():
        raise SampleError(
            f"{path}: not a regular file; it is read more than once, so save it first"
        )
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return Source("Parquet", (path,), lambda: read_parquet([path], fields))
    if suffix == ".txt":
        separator = "form feeds" if _has_form_feed(path) else "blank lines"
        by_form_feed = separator == "form feeds"
        kind = f"text, samples separated by {separator}"
        return Source(kind, (path,), lambda: _read_text(path, by_form_feed=by_form_feed))
    return Source("JSONL", (path,), lambda: _read_jsonl(path, fields, path.name))


def _open_directory(path: Path, fields: Fields) -> Source:
    saved = shards(path)
    if saved is not None:
        return Source("saved dataset", saved, lambda: read_arrow(saved, fields))
    suffixes = {".txt": "text", ".jsonl": "JSONL", ".parquet": "Parquet"}
    files = sorted(
        (file for file in path.rglob("*") if file.suffix.lower() in suffixes and not file.is_dir()),
        key=lambda file: file.relative_to(path).as_posix(),
    )
    files = [f for f in files if not any(p.startswith(".") for p in f.relative_to(path).parts)]
    kinds = sorted({suffixes[file.suffix.lower()] for file in files})
    if not kinds:
        raise SampleError(
            f"{path}: no .txt, .jsonl or .parquet files in it, nor is it what save_to_disk wrote"
        )
    if len(kinds) > 1:
        raise SampleError(
            f"{path}: holds {' and '.join(kinds)} files; give a directory of one kind"
        )
    found = tuple(files)
    kind = f"{len(found)} {kinds[0]} file{'s' if len(found) > 1 else ''}"
    if kinds[0] == "Parquet":
        return Source(kind, found, lambda: read_parquet(found, fields))
    if kinds[0] == "text":
        return Source(f"{kind}, one sample each", found, lambda: _read_files(path, found))
    return Source(kind, found, lambda: _read_lines_of(path, found, fields))


def _read_jsonl(path: Path, fields: Fields, name: str) -> Iterator[Sample]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise SampleError(
                f"{where}: not JSON ({_why(error)}); each line must be one JSON object"
            ) from None
        if not isinstance(record, dict):
            raise SampleError(f"{where}: a JSON {kind_of(record)}; each line must be an object")
        yield sample_of(record, fields, where, f"{name}, line {number}")


def _why(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return error.msg
    return "not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error).splitlines()[0]


def _read_lines_of(root: Path, files: tuple[Path, ...], fields: Fields) -> Iterator[Sample]:
    for file in files:
        yield from _read_jsonl(file, fields, file.relative_to(root).as_posix())


def _read_text(path: Path, *, by_form_feed: bool) -> Iterator[Sample]:
    """Yields samples between blank lines or form feeds, without the line ends around them."""
    lines: list[str] = []
    start = 1
    for number, line in _lines(path):
        text = _decode(line, f"{path}, line {number}")
        blank = ["", ""]  # the end of a sample and the beginning of the next
        pieces = text.split("\f") if by_form_feed else [text] if text.strip() else blank
        for index, piece in enumerate(pieces):
            if index and lines:
                yield Sample("".join(lines).strip("\r\n"), f"{path.name}, line {start}")
                lines = []
            if lines or piece.strip():
                start = start if lines else number
                lines.append(piece)
    if lines:
        yield Sample("".join(lines).strip("\r\n"), f"{path.name}, line {start}")


def _read_files(root: Path, files: tuple[Path, ...]) -> Iterator[Sample]:
    for file in files:
        with _reading(file):
            content = file.read_bytes().removeprefix(_BOM)
        yield Sample(_decode(content, str(file)), file.relative_to(root).as_posix())


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields numbered lines with their ends, without a byte order mark."""
    with _reading(path), path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            yield number, line.removeprefix(_BOM) if number == 1 else line


def _decode(content: bytes, where: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise SampleError(
            f"{where}: not UTF-8 (byte 0x{content[error.start]:02x}); convert it first"
        ) from None


def _has_form_feed(path: Path) -> bool:
    with _reading(path), path.open("rb") as file:
        return any(b"\f" in piece for piece in iter(lambda: file.read(_PIECE), b""))


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns an OSError about a file into a one-line SampleError that names it."""
    try:
        yield
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        raise SampleError(f"{path}: {'no such file' if missing else error.strerror}") from None
