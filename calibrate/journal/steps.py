"""Keeps the results of finished steps, from which a killed run continues, next to the journal.

    golden.json              what the step depends on, its result as text, the hash of its arrays
    golden.safetensors       its arrays, if it has any

A record is moved into place after its arrays are on the disk. A step that depends on something else
than the one that was kept is computed again, and replaces it.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from calibrate.journal.activations import disk_error, flush
from calibrate.journal.directory import altered, make_directory, read_json, write_json
from octet.errors import CheckpointError
from octet.model.checkpoint import sha256_file
from octet.storage.tensors import Tensor, TensorFile, write_tensors

__all__ = ["Kept", "Steps"]

Kept: TypeAlias = tuple[str, dict[str, NDArray[Any]]]  # the text and the arrays of a step


class Steps:
    """Results of steps in `directory`; `identity` is what all of them depend on."""

    def __init__(self, directory: Path, identity: Mapping[str, str]) -> None:
        self._directory, self._identity = directory, dict(identity)

    def load(self, name: str, *inputs: str) -> Kept | None:
        """Returns the text and the arrays of a step; None if none was kept with these `inputs`.

        Raises ArtifactError if they were altered.
        """
        record, arrays = self._paths(name)
        if not record.exists():
            return None
        found = read_json(record)
        if found["depends"] != self._depends(inputs):
            return None
        try:
            if sha256_file(arrays) != found["arrays"]:
                raise altered(arrays)
            stored = TensorFile.open(arrays)
        except (OSError, CheckpointError):
            raise altered(arrays) from None
        return found["text"], {key: stored.read(key).codes for key in stored.names}

    def keep(self, name: str, *inputs: str, text: str, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Keeps a finished step; raises ArtifactError if it cannot be written."""
        record, path = self._paths(name)
        make_directory(self._directory)
        temporary = path.with_name(f"{path.name}.partial")
        try:
            record.unlink(missing_ok=True)  # of the arrays that are replaced
            tensors = {key: Tensor.of(np.ascontiguousarray(x)) for key, x in arrays.items()}
            digest = write_tensors(temporary, tensors)
            flush(temporary)
            os.replace(temporary, path)
        except OSError as error:
            raise disk_error(path, error) from None
        finally:
            temporary.unlink(missing_ok=True)
        write_json(record, {"depends": self._depends(inputs), "arrays": digest, "text": text})

    def _depends(self, inputs: Sequence[str]) -> dict[str, str]:
        digest = hashlib.sha256("\n".join(inputs).encode()).hexdigest()
        return self._identity | {"inputs": digest}

    def _paths(self, name: str) -> tuple[Path, Path]:
        return self._directory / f"{name}.json", self._directory / f"{name}.safetensors"
