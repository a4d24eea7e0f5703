"""Loads samples to calibrate with: one reader for each kind of file or directory.

`open_source` chooses by what the path is: a directory that `datasets.save_to_disk` wrote, another
directory of text, JSONL or Parquet files, a Parquet file, a text file; any other file is JSONL.
Readers yield samples as they read, so that the first few of a large file cost little. Every error
names the file and the line or row.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from calibrate.samples.parquet import read_arrow, read_parquet, shards
from calibrate.samples.sample import Fields, Sample, kind_of, sample_of
from octet.errors import SampleError
from octet.model.checkpoint import sha256_file
from octet.model.not_a_checkpoint import is_hub_name
from octet.storage.files import LFS_POINTER, is_lfs_pointer

__all__ = [
    "MINIMUM",
    "LongPolicy",
    "Sample",
    "SampleFile",
    "Sampling",
    "Source",
    "load_samples",
    "open_source",
    "read_records",
    "require_enough",
]

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
        if not path.exists() and is_hub_name(path):
            raise SampleError(
                f"{path}: no such file; a data set on the Hugging Face Hub has to be downloaded"
                f" first: hf download {path} --repo-type dataset --local-dir {path.name}"
            )
        path.stat()
    if path.is_dir():
        return _open_directory(path, fields)
    if not path.is_file():
        raise SampleError(
            f"{path}: not a regular file; it is read more than once, so save it first"
        )
    suffix = path.suffix.lower()
    if (other := _other_kind(path, suffix)) is not None:
        raise SampleError(f"{path}: {other}")
    if suffix == ".parquet":
        return Source("Parquet", (path,), lambda: read_parquet([path], fields))
    if suffix == ".txt":
        separator = "form feeds" if _has_form_feed(path) else "blank lines"
        by_form_feed = separator == "form feeds"
        kind = f"text, samples separated by {separator}"
        return Source(kind, (path,), lambda: _read_text(path, by_form_feed=by_form_feed))
    return Source("JSONL", (path,), lambda: _read_jsonl(path, fields, path.name))


# The first bytes of files that hold samples in a form that is not read -> what to do.
_MAGIC = {
    b"\x1f\x8b": "compressed with gzip; unpack it: gunzip -k",
    b"\x28\xb5\x2f\xfd": "compressed with zstd; unpack it: zstd -d",
    b"\xfd7zXZ": "compressed with xz; unpack it: xz -dk",
    b"BZh": "compressed with bzip2; unpack it: bzip2 -dk",
    b"PK\x03\x04": "a ZIP or Excel file; unpack it, or save it as JSONL",
    b"%PDF": "a PDF file; save its text as .txt",
    b"ARROW1": "an Arrow file; give the directory that save_to_disk wrote",
}
_EACH_ROW = 'python -c "import csv, json, sys; [print(json.dumps(row)) for row in {rows}]"'


def _other_kind(path: Path, suffix: str) -> str | None:
    """Returns what a file is that holds samples in no form that is read, and what to do."""
    with _reading(path), path.open("rb") as file:
        beginning = file.read(64)
    if is_lfs_pointer(beginning):
        return LFS_POINTER
    for magic, what in _MAGIC.items():
        if beginning.startswith(magic):
            return f"{what} {path}" if what.endswith(("k", "-d")) else what
    out = path.with_suffix(".jsonl").name
    if suffix in (".csv", ".tsv"):
        delimiter = ", delimiter='\\t'" if suffix == ".tsv" else ""
        rows = _EACH_ROW.format(rows=f"csv.DictReader(sys.stdin{delimiter})")
        return (
            f"a table of {suffix[1:].upper()}, which is not read; convert it: {rows} < {path} >"
            f" {out}, and name its column with --text-field"
        )
    if suffix not in (".txt", ".parquet") and beginning.removeprefix(_BOM).lstrip()[:1] == b"[":
        rows = _EACH_ROW.format(rows="json.load(sys.stdin)").replace("csv, ", "")
        out = out if out != path.name else f"{path.stem}-lines.jsonl"
        return (
            f"one JSON array; write each of its items on a line of its own: {rows} < {path} > {out}"
        )
    return None


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
        others = sorted({"".join(x.suffixes[-2:]) for x in path.rglob("*.*") if x.is_file()})
        has = f"; it has {', '.join(others[:5])} files" if others else ""
        raise SampleError(
            f"{path}: no .txt, .jsonl or .parquet files in it, nor is it what save_to_disk"
            f" wrote{has}"
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
    for record, where, origin in read_records(path, name):
        yield sample_of(record, fields, where, origin)


def read_records(path: Path, name: str) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yields the object on each line of a JSONL file that is not blank, as it is read.

    Its place comes as the beginning of an error, and as the origin of a sample: "`name`, line 3".
    Raises SampleError for a line that is no JSON object.
    """
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
        yield record, where, f"{name}, line {number}"


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


LongPolicy = Literal["cut", "split", "refuse"]
MINIMUM = 128  # below this, calibration needs --allow-few-samples


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Selects the samples to read, and how they become batches."""

    samples: Path
    held_out: Path | None = None  # for golden records and divergence; default: the next samples
    count: int = 256  # samples to run
    text_field: str = "text"
    messages_field: str = "messages"
    max_length: int = 512  # tokens in a row, at most
    long: LongPolicy = "cut"
    pack: bool = False  # join samples into full rows
    batch_size: int = 8  # rows in a forward pass
    allow_few_samples: bool = False

    @property
    def minimum(self) -> int:
        """Number of samples that need no --allow-few-samples."""
        return 1 if self.allow_few_samples else MINIMUM

    def check(self) -> None:
        """Raises SampleError for samples that cannot be read, or are too few to run."""
        fields = Fields(self.text_field, self.messages_field)
        if self.held_out is not None:
            _open_filled(self.held_out, fields)
        found, _ = _open_filled(self.samples, fields).first(self.count)
        require_enough(self.samples, len(found), self.count, self.minimum)

    def load(self) -> "tuple[SampleFile, SampleFile | None]":
        """Opens the samples, and the held-out ones if they are in a source of their own."""
        fields = self.text_field, self.messages_field
        held_out = None if self.held_out is None else load_samples(self.held_out, *fields)
        return load_samples(self.samples, *fields), held_out


@dataclass(frozen=True)
class SampleFile:
    """A source of samples in its own order, read only as far as needed.

    `sha256` is that of the file's bytes, or, for several files, of their names and contents.
    """

    path: Path
    files: tuple[Path, ...]
    sha256: str
    kind: str  # such as "JSONL"
    read: Callable[[], Iterator[Sample]] = field(repr=False)

    def first(self, count: int | None) -> tuple[tuple[Sample, ...], int]:
        """Returns the first `count` samples that are not empty (all if None).

        Also returns how many empty ones were skipped.
        """
        samples: list[Sample] = []
        empty = 0
        for sample in () if count == 0 else self.read():
            if sample.empty:
                empty += 1
                continue
            samples.append(sample)
            if len(samples) == count:
                break
        return tuple(samples), empty

    @property
    def samples(self) -> tuple[Sample, ...]:
        """All samples that are not empty, in memory."""
        return self.first(None)[0]


def load_samples(
    path: Path, text_field: str = "text", messages_field: str = "messages"
) -> SampleFile:
    """Opens a source of texts (`text_field`) and conversations (`messages_field`).

    It may be JSONL, a text file (samples separated by form feeds if it has any, by blank lines if
    not), a directory of text files (a sample each), of JSONL or of Parquet files, a Parquet file,
    or a directory that `datasets.save_to_disk` wrote. Only the first sample is read yet. Raises
    SampleError, in one line, for anything but a readable source with something in it.
    """
    file = _open_filled(path, Fields(text_field, messages_field))
    return replace(file, sha256=_digest(path, file.files))


def _open_filled(path: Path, fields: Fields) -> SampleFile:
    """Opens a source and reads its first sample, but no hash; SampleError if there is none."""
    source = open_source(path, fields)
    file = SampleFile(path, source.files, "", source.kind, source.read)
    found, empty = file.first(1)
    if not found:
        what = f"all {empty} samples are empty" if empty else "is empty"
        raise SampleError(f"{path}: {what}; give texts or conversations")
    return file


def require_enough(path: Path, available: int, count: int, minimum: int) -> int:
    """Returns how many samples to run; SampleError if there are fewer than `minimum`."""
    chosen = min(available, count)
    if chosen < minimum:
        what = f"--count {count}" if count <= available else f"{path}: {available} samples"
        raise SampleError(
            f"{what}: calibration expects at least {minimum}; give more, or add --allow-few-samples"
        )
    return chosen


def _digest(path: Path, files: tuple[Path, ...]) -> str:
    try:
        if files == (path,):
            return sha256_file(path)
        whole = hashlib.sha256()
        for file in files:
            name = file.relative_to(path).as_posix()
            whole.update(f"{name}\0{sha256_file(file)}\n".encode(errors="surrogateescape"))
        return whole.hexdigest()
    except OSError as error:
        raise SampleError(f"{error.filename or path}: {error.strerror}") from None
