"""Keeps the results of finished steps, from which a killed run continues, next to the journal.

    golden.json              what the step depends on, its result as text, the hash of its arrays
    golden.safetensors       its arrays, if it has any
    0f3c.../lm_head.json     steps that depend on more, in a folder for all with the same inputs

A record is moved into place after its arrays are on the disk. The arrays of the record before it
stay until then, as `.before`. A step that depends on something else than the one that was kept is
computed again, and replaces it.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from calibrate.journal.activations import disk_error, flush
from calibrate.journal.directory import altered, make_directory, read_json, write_json
from octet.errors import CheckpointError
from octet.model.checkpoint import sha256_file
from octet.storage.tensors import Tensor, TensorFile, write_tensors

__all__ = ["NOT_KEPT", "Kept", "Steps"]

T = TypeVar("T")
Kept: TypeAlias = tuple[str, dict[str, NDArray[Any]]]  # the text and the arrays of a step


class Steps:
    """Results of steps in `directory`; `identity` is what all of them depend on.

    Without a directory, nothing is kept.
    """

    def __init__(self, directory: Path | None, identity: Mapping[str, str]) -> None:
        self._directory, self._identity = directory, dict(identity)

    def depending_on(self, *inputs: str) -> "Steps":
        """Returns steps that depend on `inputs` too, and do not replace those of other inputs."""
        text = json.dumps([self._identity, *inputs], sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        directory = self._directory and self._directory / digest[:16]
        return Steps(directory, {"shared inputs": digest})

    def has(self, name: str) -> bool:
        """Returns True if a step without inputs of its own was kept."""
        return self.load(name) is not None

    def once(self, name: str, kind: type[T], compute: Callable[[], T]) -> T:
        """Returns the result of a step, a dataclass of plain data; computes it if none was kept.

        Floats are kept exactly, NaN and infinity included.
        """
        adapter = TypeAdapter(kind)
        if kept := self.load(name):
            return adapter.validate_python(json.loads(kept[0]))
        found = compute()
        self.keep(name, text=json.dumps(adapter.dump_python(found)), arrays={})
        return found

    def load(self, name: str, *inputs: str) -> Kept | None:
        """Returns the text and the arrays of a step; None if none was kept with these `inputs`.

        Raises ArtifactError if they were altered.
        """
        if self._directory is None:
            return None
        record, arrays = self._paths(self._directory, name)
        if not record.exists():
            return None
        found = read_json(record)
        if found["depends"] != self._depends(inputs):
            return None
        try:
            before = _before(arrays)  # there only if a run ended before it wrote a newer record
            if before.exists() and sha256_file(before) == found["arrays"]:
                arrays = before
            elif sha256_file(arrays) != found["arrays"]:
                raise altered(arrays)
            stored = TensorFile.open(arrays)
        except (OSError, CheckpointError):
            raise altered(arrays) from None
        return found["text"], {key: stored.read(key).codes for key in stored.names}

    def keep(self, name: str, *inputs: str, text: str, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Keeps a finished step; raises ArtifactError if it cannot be written."""
        if self._directory is None:
            return
        record, path = self._paths(self._directory, name)
        make_directory(self._directory)
        temporary = path.with_name(f"{path.name}.partial")
        try:
            tensors = {  # ascontiguousarray makes a shape of () one of (1,)
                key: Tensor.of(np.ascontiguousarray(x).reshape(np.shape(x)))
                for key, x in arrays.items()
            }
            digest = write_tensors(temporary, tensors)
            flush(temporary)
            before = _before(path)
            known = read_json(record)["arrays"] if record.exists() else None
            if known is not None and not (before.exists() and sha256_file(before) == known):
                os.replace(path, before)
            os.replace(temporary, path)
        except OSError as error:
            raise disk_error(path, error) from None
        finally:
            temporary.unlink(missing_ok=True)
        write_json(record, {"depends": self._depends(inputs), "arrays": digest, "text": text})
        before.unlink(missing_ok=True)

    def _depends(self, inputs: Sequence[str]) -> dict[str, str]:
        digest = hashlib.sha256("\n".join(inputs).encode()).hexdigest()
        return self._identity | {"inputs": digest}

    @staticmethod
    def _paths(directory: Path, name: str) -> tuple[Path, Path]:
        return directory / f"{name}.json", directory / f"{name}.safetensors"


def _before(arrays: Path) -> Path:
    """Returns where the arrays of a record stay until the record of newer ones is written."""
    return arrays.with_name(f"{arrays.name}.before")


NOT_KEPT = Steps(None, {})
