"""Histograms of live activations, which a server counts and `octet drift` reads: no text, no ids.

A directory holds a file for each *window* of traffic and process: `ENGINE-RANK-NUMBER.safetensors`.
Its tensors are those of a calibration's histograms.safetensors. Its metadata, one JSON object under
"octet", says what was counted. A window ends with the counted step that brings it to
`window_tokens` tokens, so at the same step in each rank of an engine; a reader adds ranks up.

Files appear whole, by a rename. The newest `KEPT` stay in the directory. A writer that fails, on a
full disk say, loses that window and goes on: counting never ends a server.
"""

import contextlib
import logging
import os
import random
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from octet.artifacts.calibration import Calibration, StoredHistograms, pack_histogram
from octet.artifacts.manifest import Manifest
from octet.errors import ArtifactError, CheckpointError, ConfigError
from octet.numerics.counting import BINS
from octet.storage.files import parse_json, refuse_newer
from octet.storage.tensors import TensorFile, write_tensors

__all__ = ["KEPT", "Counting", "LiveCounts", "LiveRecord", "LiveWindow", "read_live"]

KEPT = 256  # files of a directory; a reader maps them all
_METADATA = "octet"
_SUFFIX = ".safetensors"
_LARGEST = 1 << 30  # bytes of a file
_PARTIAL = ".partial"
_STALE_S = 600.0  # age at which a partial file is removed: writing takes seconds
_NAME = re.compile(r"[0-9a-f]{1,64}-\d+-\d+\.safetensors")

ReadCounts = Callable[[], Mapping[str, NDArray[np.int64]]]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Counting:
    """Says which steps are counted, and where the counts are kept."""

    directory: Path
    one_step_in: int = 100  # on average, one of so many steps of the engine is counted
    window_tokens: int = 4096  # number of counted tokens after which a file is written


class LiveRecord(BaseModel):
    """Describes a file of live histograms: its metadata."""

    model_config = ConfigDict(frozen=True)

    schema_version: int = 1
    calibration: Annotated[str, Field(max_length=200)]  # identity of the one that was exported
    model: Annotated[str, Field(max_length=1000)]
    recipe: Annotated[str, Field(max_length=1000)]
    engine: Annotated[str, Field(pattern="^[0-9a-f]{1,64}$")]  # one name for all ranks of an engine
    rank: Annotated[int, Field(ge=0)]
    number: Annotated[int, Field(ge=0)]  # number of the window, from 0 in each engine
    tokens: Annotated[int, Field(ge=1, le=1 << 48)]
    steps: Annotated[int, Field(ge=1)]
    one_step_in: Annotated[int, Field(ge=1)]
    started: float  # seconds since 1970
    ended: float


class LiveCounts:
    """Counts the activations of one process, and writes a file after each window."""

    def __init__(
        self,
        options: Counting,
        exported: Manifest,
        *,
        engine: str | None = None,
        rank: int = 0,
    ) -> None:
        """Counts for `exported`, the export that is served.

        Raises ConfigError for an export that names no calibration, or a directory that cannot be
        written.
        """
        if exported.calibration is None:
            raise ConfigError(
                f"{exported.model.name}: its manifest names no calibration to compare live"
                " activations with; export it from a calibration, or do not count"
            )
        directory = options.directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                pass
            _remove_stale(directory)
        except OSError as error:
            raise ConfigError(
                f"{directory}: live activations cannot be counted there ({error.strerror}); give a"
                " directory that this user may write"
            ) from None
        self.options = options
        self.counted_tokens = self.written = self.failed = 0
        self._exported = exported
        self._engine = engine or os.urandom(8).hex()
        self._rank = rank
        self._number = 0
        # Steps are drawn at random, the same ones on all ranks of an engine. Every Nth step could
        # always be a prefill, or never, if all requests take a multiple of N steps.
        self._random = random.Random(self._engine)
        self._writing: threading.Thread | None = None
        self._clear()

    def _clear(self) -> None:
        self._counts: dict[str, NDArray[np.int64]] = {}
        self._tokens = self._steps = 0
        self._started = time.time()

    def begin_step(self) -> bool:
        """Returns True if the activations of the step that begins are to be counted."""
        return self._random.random() * self.options.one_step_in < 1

    def add(self, name: str, counts: NDArray[np.int64]) -> None:
        """Adds the int64 [32768] `counts` of an observation of the current step."""
        if name in self._counts:
            self._counts[name] += counts
        else:
            self._counts[name] = counts.copy()

    def ends_with(self, tokens: int) -> bool:
        """Returns True if a counted step of `tokens` tokens would end the window."""
        return self._tokens + tokens >= self.options.window_tokens

    def end_step(self, tokens: int, read: ReadCounts | None = None) -> bool:
        """Ends a counted step of `tokens` tokens; returns True if it ended the window.

        Another thread writes a window while the next one is counted. Counts that were not added one
        by one are those that `read` returns, by observation: that thread calls it at the end.
        """
        self._tokens += tokens
        self._steps += 1
        self.counted_tokens += tokens
        return self.ends_with(0) and self.flush(read)

    def flush(self, read: ReadCounts | None = None) -> bool:
        """Ends the window, if anything was counted in it."""
        if not self._tokens or not (self._counts or read):
            return False
        record = LiveRecord(
            calibration=self._exported.calibration or "",
            model=self._exported.model.name,
            recipe=self._exported.recipe.name,
            engine=self._engine,
            rank=self._rank,
            number=self._number,
            tokens=self._tokens,
            steps=self._steps,
            one_step_in=self.options.one_step_in,
            started=self._started,
            ended=time.time(),
        )
        self._number += 1
        added = self._counts
        self.close()  # one is written at a time
        self._writing = threading.Thread(
            target=self._write,
            args=(record, read or (lambda: added)),
            name="octet-live",
            daemon=True,
        )
        self._writing.start()
        self._clear()
        return True

    def close(self) -> None:
        """Waits until the last window that ended is written."""
        if self._writing is not None:
            self._writing.join()

    def _write(self, record: LiveRecord, read: ReadCounts) -> None:
        counts = read()
        name = f"{record.engine}-{record.rank}-{record.number}{_SUFFIX}"
        directory = self.options.directory
        beside = directory / f".{name}{_PARTIAL}"
        try:
            tensors = {key: part for x in counts for key, part in pack_histogram(x, counts[x])}
            write_tensors(beside, tensors, {_METADATA: record.model_dump_json()})
            os.replace(beside, directory / name)
            self.written += 1
            _remove_old(directory)
        except OSError as error:
            if not self.failed:  # every window would fail in the same way
                log.warning("%s: live activations are not kept: %s", directory, error.strerror)
            self.failed += 1
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)


def _files(directory: Path) -> list[tuple[float, Path]]:
    """Returns the files of live histograms with their time of change, oldest first."""
    found = []
    for path in directory.iterdir():
        if _NAME.fullmatch(path.name):
            with contextlib.suppress(FileNotFoundError):  # removed by a writer meanwhile
                found.append((path.stat().st_mtime, path))
    return sorted(found)


def _remove_old(directory: Path) -> None:
    for _, path in _files(directory)[:-KEPT]:
        path.unlink(missing_ok=True)


def _remove_stale(directory: Path) -> None:
    """Removes what killed processes had begun to write."""
    for path in directory.glob(f".*{_SUFFIX}{_PARTIAL}"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > _STALE_S:
                path.unlink()


@dataclass(frozen=True)
class LiveWindow:
    """One window of one engine: the counts of all its ranks together."""

    records: tuple[LiveRecord, ...]
    parts: tuple[Mapping[str, NDArray[np.int64]], ...]  # one for each record

    @property
    def tokens(self) -> int:
        """Tokens that were counted; each rank of an engine counts the same ones."""
        return self.records[0].tokens

    @property
    def began(self) -> float:
        """Seconds since 1970."""
        return self.records[0].started

    @property
    def ended(self) -> float:
        return self.records[0].ended

    @property
    def names(self) -> frozenset[str]:
        return frozenset().union(*self.parts)

    def counts(self, name: str) -> NDArray[np.int64]:
        """Returns int64 [32768] of an observation; zeros if it was not counted."""
        found = [part[name] for part in self.parts if name in part]
        return np.asarray(np.sum(found, axis=0)) if found else np.zeros(BINS, np.int64)


def read_live(directory: Path, calibration: Calibration) -> list[LiveWindow]:
    """Reads the windows of `calibration` in `directory`, oldest first.

    A server may write the directory meanwhile, also one of another calibration. Raises ConfigError
    for no window, and ArtifactError for one that is damaged, or if all are of other calibrations.
    """
    try:
        files = [path for _, path in _files(directory)[-KEPT:]]
    except OSError as error:
        raise ConfigError(f"{directory}: {error.strerror}") from None
    parts: dict[tuple[str, int], list[tuple[LiveRecord, StoredHistograms]]] = {}
    others: list[tuple[Path, LiveRecord]] = []
    for path in files:
        opened = _open(path)
        if opened is None:
            continue
        record, file = opened
        if record.calibration != calibration.manifest.identity:
            others.append((path, record))
            continue
        check_stored(path, file, calibration.observations)
        counts = StoredHistograms(file, summed=True)
        parts.setdefault((record.engine, record.number), []).append((record, counts))
    if others and not parts:
        require_same(*others[-1], calibration)
    if others:
        line = "%s: %d of %d files are of other calibrations, and left out"
        log.warning(line, directory, len(others), len(files))
    if not parts:
        raise ConfigError(
            f"{directory}: no live histograms; a server writes the first one when it has counted"
            " a window of tokens (docs/guides/drift.md)"
        )
    return [LiveWindow(*zip(*of_one, strict=True)) for of_one in parts.values()]


def _open(path: Path) -> tuple[LiveRecord, TensorFile] | None:
    """Opens a file; None if it has been removed."""
    try:
        if path.stat().st_size > _LARGEST:
            raise ArtifactError(f"{path}: larger than live histograms can be; remove it")
        file = TensorFile.open(path)
    except (FileNotFoundError, CheckpointError) as error:
        if not path.exists():
            return None
        raise ArtifactError(f"{error}; remove it") from None
    return _record(path, file.metadata.get(_METADATA)), file


def _record(path: Path, text: str | None) -> LiveRecord:
    try:
        data = parse_json((text or "null").encode())
        if isinstance(data, dict):
            refuse_newer(path, data.get("schema_version"), 1)
        return LiveRecord.model_validate(data)
    except (ValueError, ValidationError) as error:
        detail = str(error).splitlines()[0]
        raise ArtifactError(f"{path}: not live histograms ({detail}); remove it") from None


def require_same(path: Path, record: LiveRecord, calibration: Calibration) -> None:
    """Raises ArtifactError unless the file is of an export of `calibration`."""
    manifest = calibration.manifest
    if record.calibration == manifest.identity:
        return
    what = f"model {record.model}, recipe {record.recipe}"
    if (record.model, record.recipe) == (manifest.model.name, manifest.recipe.name):
        what = "another calibration of the same model and recipe"
    raise ArtifactError(
        f"{path}: live histograms of {what} (calibration {record.calibration[:12]});"
        f" {calibration.path} is of model {manifest.model.name}, recipe {manifest.recipe.name}"
        f" ({manifest.identity[:12]}): give the calibration that the served export was made from"
    )


def check_stored(path: Path, file: TensorFile, observed: Iterable[str]) -> None:
    """Raises ArtifactError unless each tensor is a histogram of one of `observed`, in one row."""
    names = set(observed)
    stored = {name.removesuffix(".bins").removesuffix(".counts") for name in file.names}
    for name in sorted(stored):
        problem = _problem(file, name) if name in names else "the calibration has no such tensor"
        if problem:
            raise ArtifactError(f"{path}: {name}: {problem}; remove it")


def _problem(file: TensorFile, name: str) -> str | None:
    bins, counts = f"{name}.bins", f"{name}.counts"
    if bins not in file.names or counts not in file.names:
        return "bins or counts are missing"
    if file.dtype(bins) != "U16" or file.dtype(counts) not in ("U8", "U16", "U32", "U64"):
        return "stored in a dtype that no histogram has"
    if len(file.shape(bins)) != 1 or file.shape(bins) != file.shape(counts):
        return "bins and counts differ in shape"
    found = file.read(bins).codes.astype(np.int64)
    if len(found) and (found[-1] >= BINS or (np.diff(found) <= 0).any()):
        return "its bins do not ascend from 0 to 32767"
    if file.read(counts).codes.max(initial=0) > 1 << 48:
        return "its counts are impossible"
    return None
