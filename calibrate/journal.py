"""What a killed run continues from: every finished layer's counts, and what enters the next.

    journal.json             what the counts depend on (`calibrate.identity`), but not the recipe
    layer-003.safetensors    int64 [chunks, 32768] for each tensor of layer 3
    layer-003.json           hashes of that file and of the activations; its arrival ends the layer
    activations-003/         what layer 3 gave, one file a batch

A layer is finished when its .json is there, which is moved into place after everything that it
names. What is found of an unfinished layer is removed. Several processes share one journal: rank 0
writes it, and each its own batches' activations.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from calibrate.activations import ActivationFiles, disk_error
from calibrate.batches import Batch
from calibrate.distributed import Group
from calibrate.layers import LayeredModel
from octet.calibration import BINS
from octet.checkpoint import sha256_file
from octet.errors import ArtifactError, CheckpointError, OctetError
from octet.tensors import Tensor, TensorFile, write_tensors

__all__ = ["Journal"]

SCHEMA_VERSION = 1

# What may be found where a journal was to begin, or was being discarded, when the process died.
_OWN = re.compile(
    r"lock|(journal\.json|layer-\d+\.(json|safetensors))(\.partial)?|layer-\d+\.partial"
    r"|activations-\d+"
)


class Journal:
    """The journal in `path`; `finished` layers are in it."""

    def __init__(
        self, path: Path, group: Group, records: list[dict[str, Any]], lock: IO[str] | None
    ) -> None:
        self.path = path
        self._group = group
        self._records = records
        self._lock = lock

    @classmethod
    def open(
        cls, path: Path, identity: Mapping[str, str], group: Group, *, restart: bool = False
    ) -> "Journal":
        """Begins a journal, or continues that of the same run.

        ArtifactError for one of another run unless `restart`, which discards it, for one that was
        altered, and for one that another process has open.
        """
        records: list[dict[str, Any]] = []
        error: OctetError | None = None
        lock: IO[str] | None = None
        try:
            if group.rank == 0:
                try:
                    lock = _lock(path)
                    records = _open(path, identity, restart)
                except OctetError as caught:
                    error = caught
            group.agree(error)
        except BaseException:
            if lock is not None:
                lock.close()
            raise
        return cls(path, group, group.gather(records)[0], lock)

    def close(self) -> None:
        """Lets another process have the journal."""
        if self._lock is not None:
            self._lock.close()

    @property
    def finished(self) -> int:
        """How many layers are finished."""
        return len(self._records)

    def histograms(self, index: int, names: Sequence[str], chunks: int) -> NDArray[np.int64]:
        """int64 [names, chunks, 32768] of a finished layer, on every rank."""
        counts = np.zeros((len(names), chunks, BINS), np.int64)
        error: OctetError | None = None
        if self._group.rank == 0:
            try:
                counts[:] = self._read(index, names)
            except OctetError as caught:
                error = caught
        self._group.agree(error)
        return self._group.sum(counts)

    def kept(self, model: LayeredModel, batches: Sequence[Batch]) -> ActivationFiles:
        """What the last finished layer gave."""
        index = self.finished - 1
        expected = {int(batch): digest for batch, digest in self._records[index]["given"].items()}
        return ActivationFiles(self._directory(index), model, batches, expected=expected)

    def begin(self, index: int, model: LayeredModel, batches: Sequence[Batch]) -> ActivationFiles:
        """Where to write what layer `index` gives."""
        directory = self._directory(index)
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise disk_error(directory, error) from None
        return ActivationFiles(directory, model, batches, hashed=True)

    def commit(
        self,
        index: int,
        histograms: Mapping[str, NDArray[np.int64]],
        given: ActivationFiles | None,
    ) -> None:
        """Ends layer `index`: `histograms` are the sums of all ranks, `given` what it gave.

        ArtifactError if it cannot be written; the layers before stay finished.
        """
        hashes: dict[str, str] = {}
        for part in self._group.gather({} if given is None else given.hashes):
            hashes |= {str(batch): digest for batch, digest in sorted(part.items())}
        error: OctetError | None = None
        record: dict[str, Any] = {}
        if self._group.rank == 0:
            try:
                record = self._write(index, histograms, hashes)
            except OSError as caught:
                error = disk_error(self._layer(index), caught)
        self._group.agree(error)
        self._records.append(record)
        if index > 0:
            shutil.rmtree(self._directory(index - 1), ignore_errors=True)

    def _write(
        self, index: int, histograms: Mapping[str, NDArray[np.int64]], given: Mapping[str, str]
    ) -> dict[str, Any]:
        path = self._layer(index)
        temporary = path.with_suffix(".partial")
        try:
            write_tensors(
                temporary, {name: Tensor.of(counts) for name, counts in histograms.items()}
            )
            record = {"histograms": sha256_file(temporary), "given": given}
            os.replace(temporary, path)
            _write_json(path.with_suffix(".json"), record)
        finally:
            temporary.unlink(missing_ok=True)
        return record

    def _read(self, index: int, names: Sequence[str]) -> NDArray[np.int64]:
        path = self._layer(index)
        if not path.exists() or sha256_file(path) != self._records[index]["histograms"]:
            raise _altered(path)
        try:
            file = TensorFile.open(path)
            return np.stack([file.read(name).codes for name in names])
        except (CheckpointError, KeyError):
            raise _altered(path) from None

    def _layer(self, index: int) -> Path:
        return self.path / f"layer-{index:03d}.safetensors"

    def _directory(self, index: int) -> Path:
        return self.path / f"activations-{index:03d}"


def _open(path: Path, identity: Mapping[str, str], restart: bool) -> list[dict[str, Any]]:
    """The records of the finished layers; [] for a journal that begins."""
    head = path / "journal.json"
    if restart:
        head.unlink(missing_ok=True)  # first: what is left without it is nobody's
    if not head.exists():
        _discard(x for x in path.iterdir() if _OWN.fullmatch(x.name))
        try:
            _write_json(head, {"schema_version": SCHEMA_VERSION, "identity": dict(identity)})
        except OSError as error:
            raise disk_error(head, error) from None
        return []
    found = _read_json(head)
    if found.get("schema_version") != SCHEMA_VERSION:
        raise ArtifactError(f"{path}: a journal of another release; --restart begins anew")
    for what, value in identity.items():
        if found["identity"].get(what) != value:
            raise ArtifactError(
                f"{path}: the journal of a run with another {what}; --restart discards it"
            )
    records: list[dict[str, Any]] = []
    while (record := path / f"layer-{len(records):03d}.json").exists():
        records.append(_read_json(record))
    _discard(path.glob("*.partial"))
    _discard(
        x for x in path.glob("activations-*") if x.name != f"activations-{len(records) - 1:03d}"
    )
    return records


def _lock(path: Path) -> IO[str]:
    """The journal's directory, made if need be, for this process alone until the file is closed."""
    begun = path.is_dir() and (
        (path / "journal.json").exists() or all(_OWN.fullmatch(x.name) for x in path.iterdir())
    )
    if path.exists() and not begun:
        raise ArtifactError(f"{path}: exists and is not a journal; choose another")
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / "lock").open("w")
    except OSError as error:
        raise disk_error(path / "lock", error) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise ArtifactError(f"{path}: another process is calibrating with this journal") from None
    return lock


def _discard(paths: Iterable[Path]) -> None:
    for path in list(paths):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != "lock":
            path.unlink(missing_ok=True)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes `content` with its own hash, and moves it into place."""
    temporary = path.with_name(f"{path.name}.partial")
    text = json.dumps(content, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    temporary.write_text(json.dumps({"content": content, "sha256": digest}, indent=1) + "\n")
    os.replace(temporary, path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
        content: dict[str, Any] = data["content"]
        text = json.dumps(content, sort_keys=True)
        if hashlib.sha256(text.encode()).hexdigest() != data["sha256"]:
            raise _altered(path)
    except (OSError, ValueError, KeyError, TypeError):
        raise _altered(path) from None
    return content


def _altered(path: Path) -> ArtifactError:
    return ArtifactError(
        f"{path}: altered since it was written (SHA-256 differs); --restart begins anew"
    )
