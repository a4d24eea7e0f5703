"""Loads samples to calibrate with; every error names the file and the line or row."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from calibrate.samples.readers import Source, open_source
from calibrate.samples.rows import LongPolicy
from calibrate.samples.sample import Fields, Sample
from octet.errors import SampleError
from octet.model.checkpoint import sha256_file

__all__ = ["MINIMUM", "Sample", "SampleFile", "Sampling", "load_samples", "require_enough"]

MINIMUM = 128  # below this, calibration needs --allow-few-samples


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Which samples to read, and how they become batches."""

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

    def check(self) -> None:
        """Raises SampleError for a path that holds no samples; reads none yet."""
        for path in (self.held_out, self.samples):
            if path is not None:
                open_source(path, Fields(self.text_field, self.messages_field))

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
    source = open_source(path, Fields(text_field, messages_field))
    file = SampleFile(path, "", source.kind, source.read)
    found, empty = file.first(1)
    if not found:
        what = f"all {empty} samples are empty" if empty else "is empty"
        raise SampleError(f"{path}: {what}; calibration needs texts or conversations")
    return SampleFile(path, _digest(path, source), source.kind, source.read)


def require_enough(path: Path, available: int, count: int, *, allow_few: bool) -> int:
    """Returns how many samples to run; SampleError if below `MINIMUM` without `allow_few`."""
    chosen = min(available, count)
    if chosen < MINIMUM and not allow_few:
        what = f"--count {count}" if count <= available else f"{path}: {available} samples"
        raise SampleError(
            f"{what}: calibration expects at least {MINIMUM}; give more, or add --allow-few-samples"
        )
    return chosen


def _digest(path: Path, source: Source) -> str:
    try:
        if source.files == (path,):
            return sha256_file(path)
        whole = hashlib.sha256()
        for file in source.files:
            name = file.relative_to(path).as_posix()
            whole.update(f"{name}\0{sha256_file(file)}\n".encode(errors="surrogateescape"))
        return whole.hexdigest()
    except OSError as error:
        raise SampleError(f"{error.filename or path}: {error.strerror}") from None
