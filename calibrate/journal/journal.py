"""The journal from which a killed run continues: each finished layer's counts, some activations.

    journal.json             what the counts depend on (`journal.identity`), but not the recipe;
                             and the directories that activations were written to
    layer-003.safetensors    the counts of layer 3: the bins that occur (`artifacts.calibration`);
                             and the mean squares of its inputs, if they were requested
    layer-003.json           the hash of that file; its arrival finishes the layer
    activations-003/         the output of layer 3, one file per batch; below `--spill`, if given
    kept.json                which layer's activations are complete, where, and their hashes

Counts are small and are kept for every layer. Activations in memory are written only when `due`,
because those of a layer can take longer to write than to compute. A continued run recomputes the
input of the next layer from the newest activations that were kept, or from the embeddings.

Records (.json) are moved into place after everything they name is on the disk. Files of an
unfinished layer are removed. Several processes share one journal: rank 0 writes it, and each rank
writes the activations of its own batches.
"""

import hashlib
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from calibrate.decoder.layers import LayeredModel
from calibrate.journal.activations import ActivationFiles, disk_error, flush
from calibrate.journal.compact_counts import CompactCounts
from calibrate.journal.directory import (
    HEAD,
    KEPT,
    altered,
    clear_activations,
    discard_contents,
    flush_activations,
    forget_activations,
    lock_directory,
    make_directory,
    read_json,
    remove,
    remove_remains,
    unreadable,
    write_json,
)
from calibrate.journal.distributed import Group
from calibrate.journal.identity import THREADS
from calibrate.samples.batches import Batch
from octet.artifacts.calibration import StoredHistograms, pack_histogram
from octet.errors import ArtifactError, CheckpointError
from octet.hardware.cores import THREADS as OMP_THREADS
from octet.model.checkpoint import sha256_file
from octet.storage.tensors import Tensor, TensorFile, write_tensors

__all__ = ["Journal", "discard", "record_threads", "recorded_threads", "stale"]

SCHEMA_VERSION = 2
_THREADS_FILE = "threads"  # in the directory of steps, which has no head
_SQUARES = ".mean_squares"  # suffix of an observation's name
KEEP_EVERY_S = 30.0  # of work that a continued run may have to repeat


class Journal:
    """The journal in `path`, which holds `finished` layers."""

    def __init__(self, path: Path, place: Path, group: Group, lock: IO[str] | None) -> None:
        self.path = path
        self.place = place  # where activations are written
        self._group = group
        self._lock = lock
        self._records: list[dict[str, Any]] = []
        self._kept: dict[str, Any] | None = None
        self._since = time.monotonic()

    @classmethod
    def open(
        cls,
        path: Path,
        identity: Mapping[str, str],
        group: Group,
        *,
        spill: Path | None = None,
        restart: bool = False,
        force: bool = False,
    ) -> "Journal":
        """Begins a journal, or continues that of the same run. `spill` is for its activations.

        `restart` discards any journal that is there, `force` one that cannot be continued. Raises
        ArtifactError for a journal of another run, for one that was altered, and for one that
        another process has open.
        """
        path = path.absolute()
        place = path if spill is None else spill.absolute() / _name(path)
        journal = cls(path, place, group, None)
        try:
            found = group.on_first(partial(journal._open, identity, restart, force))
        except BaseException:
            journal.close()
            raise
        journal._records, journal._kept = found
        return journal

    def close(self) -> None:
        """Releases the journal for other processes."""
        if self._lock is not None:
            self._lock.close()

    @property
    def finished(self) -> int:
        """Number of finished layers."""
        return len(self._records)

    @property
    def reached(self) -> int:
        """The layer that the kept activations enter; 0 if there are none."""
        return 0 if self._kept is None else int(self._kept["layer"]) + 1

    def counts(
        self, index: int, names: Sequence[str]
    ) -> tuple[CompactCounts, dict[str, NDArray[np.float32]]]:
        """Returns int64 [chunks, 32768] for each of a finished layer's tensors, on every rank.

        Also returns the mean squares of its inputs, float32 [K], if they were kept.
        """
        return self._group.on_first(partial(self._read, index, names))

    def kept(self, model: LayeredModel, batches: Sequence[Batch]) -> ActivationFiles | None:
        """Returns the activations that enter layer `reached`, or None if none were kept."""
        if self._kept is None:
            return None
        expected = {int(batch): digest for batch, digest in self._kept["given"].items()}
        return ActivationFiles(
            self.path / self._kept["directory"], model, batches, expected=expected
        )

    def commit(
        self,
        index: int,
        histograms: Mapping[str, NDArray[np.int64]],
        mean_squares: Mapping[str, NDArray[np.float32]],
    ) -> None:
        """Finishes layer `index`; `histograms` and `mean_squares` are those of all ranks.

        Raises ArtifactError if it cannot be written; earlier layers stay finished.
        """
        write = partial(self._write, index, histograms, mean_squares)
        self._records.append(self._group.on_first(write))

    def due(self) -> bool:
        """Decides whether enough time has passed since activations were kept to do so again."""
        late = time.monotonic() - self._since >= KEEP_EVERY_S
        return bool(self._group.gather(late)[0])

    def begin(self, index: int, model: LayeredModel, batches: Sequence[Batch]) -> ActivationFiles:
        """Returns the files to write the output of layer `index` to, for `keep`."""
        directory = self._directory(index)
        self._group.attempt(partial(make_directory, directory))
        return ActivationFiles(directory, model, batches, hashed=True)

    def keep(self, index: int, files: ActivationFiles) -> None:
        """Records that a continued run starts after layer `index`.

        `files`, from `begin`, hold the complete output of that layer.
        """
        self._group.attempt(partial(flush_activations, files.directory, files.hashes))
        hashes: dict[str, str] = {}
        for part in self._group.gather(files.hashes):
            hashes |= {str(batch): digest for batch, digest in sorted(part.items())}
        # Relative within the journal, which may be moved.
        directory = files.directory.name if self.place == self.path else str(files.directory)
        record = {"layer": index, "directory": directory, "given": hashes}
        self._group.on_first(partial(write_json, self.path / KEPT, record))
        before, self._kept = self._kept, record
        if before is not None and before["directory"] != record["directory"]:
            shutil.rmtree(self.path / before["directory"], ignore_errors=True)
        self._since = time.monotonic()

    def forget(self) -> None:
        """Removes the activations, because every layer is finished."""
        self._kept = None
        self._group.on_first(partial(forget_activations, self.path))

    def _open(
        self, identity: Mapping[str, str], restart: bool, force: bool
    ) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
        """Returns the records of the finished layers, and that of the activations."""
        self._lock = lock_directory(self.path)
        if restart:
            discard_contents(self.path)
        elif (self.path / HEAD).exists():
            try:
                return self._continue(identity)
            except ArtifactError:
                if not force:
                    raise
                discard_contents(self.path)
        remove_remains(self.path)
        clear_activations(self.place)
        content = {"schema_version": SCHEMA_VERSION, "identity": dict(identity)}
        write_json(self.path / HEAD, content | {"activations": sorted(self._places())})
        return [], None

    def _places(self) -> set[str]:
        return {"."} if self.place == self.path else {".", str(self.place)}

    def _continue(
        self, identity: Mapping[str, str]
    ) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
        """Returns what `_open` does, of a journal that exists; raises ArtifactError otherwise."""
        if (reason := stale(self.path, identity)) is not None:
            raise ArtifactError(reason)
        head = self.path / HEAD
        found, places = read_json(head), self._places()
        content = {"schema_version": SCHEMA_VERSION, "identity": dict(identity)}
        places |= set(found["activations"])
        # A run for another recipe may observe less in the layers that are left: it says so.
        if len(places) > len(found["activations"]) or found["identity"] != dict(identity):
            write_json(head, content | {"activations": sorted(places)})
        records: list[dict[str, Any]] = []
        while (record := self.path / f"layer-{len(records):03d}.json").exists():
            records.append(read_json(record))
        kept = read_json(self.path / KEPT) if (self.path / KEPT).exists() else None
        if kept is not None and kept["layer"] >= len(records):  # counts before it were removed
            kept = None
        remove(self.path.glob("*.partial"))
        spared = None if kept is None else self.path / kept["directory"]
        for place in places:
            clear_activations(self.path / place, spared)
        return records, kept

    def _write(
        self,
        index: int,
        histograms: Mapping[str, NDArray[np.int64]],
        mean_squares: Mapping[str, NDArray[np.float32]],
    ) -> dict[str, Any]:
        path = self._layer(index)
        temporary = path.with_name(f"{path.name}.partial")
        try:
            packed = {
                key: part
                for name, counts in histograms.items()
                for key, part in pack_histogram(name, counts)
            }
            packed |= {name + _SQUARES: Tensor.of(means) for name, means in mean_squares.items()}
            write_tensors(temporary, packed)
            flush(temporary)
            record = {"histograms": sha256_file(temporary)}
            os.replace(temporary, path)
            write_json(path.with_suffix(".json"), record)
        except OSError as error:
            raise disk_error(path, error) from None
        finally:
            temporary.unlink(missing_ok=True)
        return record

    def _read(
        self, index: int, names: Sequence[str]
    ) -> tuple[CompactCounts, dict[str, NDArray[np.float32]]]:
        path = self._layer(index)
        found = CompactCounts()
        try:
            if sha256_file(path) != self._records[index]["histograms"]:
                raise altered(path)
            file = TensorFile.open(path)
            stored = StoredHistograms(file, summed=False)
            found.update((name, stored[name]) for name in names)
            squares = {
                name: file.read(name + _SQUARES).float32()
                for name in names
                if name + _SQUARES in file.names
            }
        except FileNotFoundError:
            raise altered(path) from None
        except OSError as error:
            raise unreadable(path, error) from None
        except (CheckpointError, KeyError):
            raise altered(path) from None
        return found, squares

    def _layer(self, index: int) -> Path:
        return self.path / f"layer-{index:03d}.safetensors"

    def _directory(self, index: int) -> Path:
        return self.place / f"activations-{index:03d}"


def discard(progress: Path) -> None:
    """Removes the directory `progress`, the journals in it, and what they keep elsewhere."""
    for head in progress.glob(f"*/{HEAD}"):
        discard_contents(head.parent)
    shutil.rmtree(progress, ignore_errors=True)


def stale(path: Path, identity: Mapping[str, str]) -> str | None:
    """Returns why a run with this `identity`, or part of it, cannot continue the journal in `path`.

    Returns None if it can, or if there is no journal.
    """
    if not (path / HEAD).exists():
        return None
    try:
        found = read_json(path / HEAD)
    except ArtifactError as error:
        return str(error)
    discards = "--restart discards it, and so does --force"
    if found.get("schema_version") != SCHEMA_VERSION:
        return f"{path}: a journal of another release; {discards}"
    for what, value in identity.items():
        if (before := found["identity"].get(what)) != value:
            continues = f"; {OMP_THREADS}={before} continues it" if what == THREADS else ""
            return f"{path}: the journal of a run with another {what}{continues}; {discards}"
    return None


def recorded_threads(progress: Path) -> int | None:
    """Returns the number of threads that computed what the directory `progress` keeps.

    Returns None if it is not recorded.
    """
    for head in (*progress.glob(f"*/{HEAD}"), *progress.glob(f"*/{_THREADS_FILE}")):
        try:
            return int(read_json(head)["identity"][THREADS])
        except (ArtifactError, KeyError, ValueError):
            return None  # opening the journal reports what is wrong
    return None


def record_threads(directory: Path, identity: Mapping[str, str]) -> None:
    """Records the threads of a run's steps, which may come before any journal.

    `directory` is in that of the run's progress. Raises ArtifactError if it cannot be written.
    """
    if THREADS in identity:
        make_directory(directory)
        write_json(directory / _THREADS_FILE, {"identity": {THREADS: identity[THREADS]}})


def _name(path: Path) -> str:
    """Returns the name of the spill directory's subdirectory for the journal in `path`."""
    return f"octet-{path.parent.name}-{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
