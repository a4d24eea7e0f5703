"""Activations between two decoder layers, for every batch: in memory, or in files.

Memory is the fast way. Files are for sets larger than memory, and for a journal to resume from.
"""

import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from calibrate.decoder.layers import LayeredModel
from calibrate.samples.batches import Batch
from octet.errors import ArtifactError, OctetError

__all__ = [
    "ActivationFiles",
    "ActivationMemory",
    "Activations",
    "Embedded",
    "Entering",
    "disk_error",
    "flush",
    "require_space",
    "temporary",
]

_ON_DEVICE = 0.4  # share of a GPU's free memory that activations may take


class Entering(Protocol):
    """Reads the hidden states [B, T, H] that enter a layer, by batch number."""

    def read(self, index: int) -> torch.Tensor:
        """Returns them on the device that computes."""


class Activations(Entering, Protocol):
    """Hidden states that are kept between layers; writing replaces them."""

    def write(self, index: int, hidden: torch.Tensor) -> None:
        """Raises OctetError if they cannot be kept."""


class Embedded:
    """The embeddings that enter the first layer, computed on every read and never stored."""

    def __init__(self, model: LayeredModel, batches: Sequence[Batch]) -> None:
        self._model, self._batches = model, batches

    def read(self, index: int) -> torch.Tensor:
        return self._model.embed(self._batches[index].token_ids)


class ActivationMemory:
    """Keeps activations in memory, on the device as long as they fit.

    They may take 0.4 of a GPU's free memory without the `reserved` bytes; the rest is kept on the
    host.
    """

    def __init__(self, device: torch.device, reserved: int = 0) -> None:
        self._device = device
        self._held: dict[int, torch.Tensor] = {}
        self._free = 0.0
        if device.type == "cuda":
            self._free = _ON_DEVICE * (torch.cuda.mem_get_info(device)[0] - reserved)

    def read(self, index: int) -> torch.Tensor:
        return self._held[index].to(self._device)

    def write(self, index: int, hidden: torch.Tensor) -> None:
        if index in self._held:  # of the same size as before, so it fits
            self._held[index] = hidden.to(self._held[index].device)
        elif hidden.is_cuda and hidden.nbytes > self._free:
            self._held[index] = hidden.cpu()
        else:
            self._free -= hidden.nbytes
            self._held[index] = hidden


class ActivationFiles:
    """Keeps activations as files of raw values in `directory`, one per batch.

    With `hashed`, `hashes` collects the SHA-256 of what is written. `expected` are the hashes that
    must match if files of an earlier process are read.
    """

    def __init__(
        self,
        directory: Path,
        model: LayeredModel,
        batches: Sequence[Batch],
        *,
        hashed: bool = False,
        expected: dict[int, str] | None = None,
    ) -> None:
        self.directory = directory
        self.hashes: dict[int, str] = {}
        self._model, self._batches = model, batches
        self._hashed, self._expected = hashed, expected

    def read(self, index: int) -> torch.Tensor:
        """Raises ArtifactError for a file that is missing or was altered since it was written."""
        path = self.path(self.directory, index)
        shape = (*self._batches[index].token_ids.shape, self._model.spec.hidden_size)
        hidden = torch.empty(shape, dtype=self._model.dtype)
        raw = _bytes(hidden)
        try:
            with path.open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                while raw and (done := file.readinto(raw)):
                    raw = raw[done:]
        except OSError as error:
            raise ArtifactError(f"{path}: {error.strerror}; --restart begins anew") from None
        altered = self._expected is not None and self._expected.get(index) != _digest(hidden)
        if size != hidden.nbytes or altered:
            raise ArtifactError(
                f"{path}: altered since it was written (SHA-256 differs); --restart begins anew"
            )
        return hidden.to(self._model.device)

    def write(self, index: int, hidden: torch.Tensor) -> None:
        """Raises ArtifactError if the disk is full or fails."""
        path, hidden = self.path(self.directory, index), hidden.cpu().contiguous()
        raw = _bytes(hidden)
        try:
            with path.open("wb", buffering=0) as file:
                while raw:
                    raw = raw[file.write(raw) :]
        except OSError as error:
            path.unlink(missing_ok=True)
            raise disk_error(
                path, error, "free some or name another directory with --spill,"
            ) from None
        if self._hashed:
            self.hashes[index] = _digest(hidden)

    @staticmethod
    def path(directory: Path, index: int) -> Path:
        """Returns the file of batch `index`."""
        return directory / f"{index:06d}.bin"


def disk_error(path: Path, error: OSError, remedy: str = "free some") -> OctetError:
    """Returns the error to raise when `path` could not be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ArtifactError(
            f"{path.parent}: no space left on the disk; {remedy} and run the same command again"
            " (layers that a journal holds are not computed again)"
        )
    return ArtifactError(f"{path}: {error.strerror}")


def require_space(directory: Path, needed_bytes: int, what: str, remedy: str) -> None:
    """Raises ArtifactError unless the disk of `directory` has `needed_bytes` free.

    `directory` need not exist. For the message, `what` names what needs the space, and `remedy` the
    alternative to freeing some.
    """
    place = next(x for x in (directory.absolute(), *directory.absolute().parents) if x.exists())
    free = shutil.disk_usage(place).free
    if free < needed_bytes:
        raise ArtifactError(
            f"{directory}: {what} needs {needed_bytes / 1e9:.1f} GB, the disk has"
            f" {free / 1e9:.1f} GB free; free some or {remedy}"
        )


def flush(path: Path) -> None:
    """Flushes the file or directory `path` from memory to the disk; raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary(spill: Path, stack: ExitStack) -> Path:
    """Creates a directory below `spill` that lasts as long as `stack`."""
    try:
        spill.mkdir(parents=True, exist_ok=True)
        directory = tempfile.TemporaryDirectory(prefix="octet-", dir=spill)
    except OSError as error:
        raise disk_error(spill, error) from None
    return Path(stack.enter_context(directory))


def _bytes(x: torch.Tensor) -> memoryview:
    raw: NDArray[np.uint8] = x.view(-1).view(torch.uint8).numpy()
    return memoryview(raw)  # type: ignore[arg-type]  # numpy arrays are buffers from 3.12 on


def _digest(x: torch.Tensor) -> str:
    return hashlib.sha256(_bytes(x)).hexdigest()
