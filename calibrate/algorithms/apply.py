"""Applies an algorithm once; keeps the changed weights for a resumed run."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from calibrate.algorithms.changed import Changed
from calibrate.decoder.loading import ComputeDtype
from calibrate.journal.distributed import Group
from calibrate.samples.batches import Batch
from octet.artifacts.calibration import WEIGHTS_FILE
from octet.errors import ArtifactError
from octet.model.checkpoint import Checkpoint, sha256_file
from octet.recipe import Recipe
from octet.storage.files import read_json
from octet.storage.tensors import Tensor, TensorFile, write_tensors

__all__ = ["ChangedModel", "changed_model"]

_SCALES, _FACTS = "scales.safetensors", "algorithm.json"


@dataclass(frozen=True)
class ChangedModel:
    """A checkpoint with the weights that an algorithm changed, if any.

    `scales` are those that the weights were fitted to; they must stay. `details` and `files` go
    into the artifact, and `warnings` into its report. So does `unfolded`: for each cache scale that
    an E5M2 cache needs, by observation, why it is not folded into the weights.
    """

    checkpoint: Checkpoint
    scales: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    unfolded: Mapping[str, str] = field(default_factory=dict)


def changed_model(
    checkpoint: Checkpoint,
    algorithm: Any,
    recipe: Recipe,
    batches: Sequence[Batch],
    directory: Path,
    *,
    dtype: ComputeDtype,
    device: torch.device,
    restart: bool = False,
    force: bool = False,
    console: Console | None = None,
    compute: Callable[[], Changed] | None = None,
    settings: str = "",
    group: Group | None = None,
) -> ChangedModel:
    """Returns `checkpoint` with the weights that `algorithm` changed, or as it is without one.

    `compute` runs an algorithm that is not ModelOpt's; its result depends on `settings`. Each rank
    of `group` runs it, and the first one writes the result to `directory`, atomically. A later call
    reads it from there. Raises ArtifactError if the directory belongs to another model, recipe,
    algorithm or set of samples, or was altered, unless `restart` or `force` discards it.
    """
    if algorithm is None:
        return ChangedModel(checkpoint)
    group = group or Group()
    key = _key(checkpoint, f"{algorithm}{settings}", recipe, batches, dtype)

    def is_kept() -> bool:
        if restart:
            shutil.rmtree(directory, ignore_errors=True)
        if directory.exists() and force:
            try:
                _read(checkpoint, directory, key)
            except ArtifactError:
                shutil.rmtree(directory, ignore_errors=True)
        return directory.exists()

    if not group.on_first(is_kept):
        from calibrate.algorithms.modelopt import apply_algorithm

        compute = compute or partial(
            apply_algorithm,
            checkpoint,
            algorithm,
            recipe,
            batches,
            dtype=dtype,
            device=device,
            console=console,
        )
        changed = compute()
        group.on_first(partial(_write, changed, algorithm, directory, key))
    return group.attempt(partial(_read, checkpoint, directory, key))


def _write(changed: Changed, algorithm: str, directory: Path, key: str) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        write_tensors(staging / WEIGHTS_FILE, changed.tensors)
        scales = {name: Tensor.of(scale) for name, scale in changed.scales.items()}
        write_tensors(staging / _SCALES, scales)
        hashes = {name: sha256_file(staging / name) for name in (WEIGHTS_FILE, _SCALES)}
        details = {"name": algorithm, **changed.details}
        facts = {"key": key, "files": hashes, "details": details}
        (staging / _FACTS).write_text(json.dumps(facts), "utf-8")
        os.replace(staging, directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _read(checkpoint: Checkpoint, directory: Path, key: str) -> ChangedModel:
    try:
        facts = read_json(directory / _FACTS)
        whole = all(sha256_file(directory / name) == sha for name, sha in facts["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        whole = False
    if not whole or facts["key"] != key:
        state = "is of another run" if whole else "was altered"
        raise ArtifactError(f"{directory}: {state}; --restart discards it, and so does --force")
    file = TensorFile.open(directory / _SCALES)
    scales = {name: file.read(name).float32() for name in file.names}
    path = directory / WEIGHTS_FILE
    return ChangedModel(
        checkpoint.with_changes(path),
        scales,
        {"algorithm": facts["details"]},
        {WEIGHTS_FILE: path},
    )


def _key(
    checkpoint: Checkpoint,
    algorithm: str,
    recipe: Recipe,
    batches: Sequence[Batch],
    dtype: ComputeDtype,
) -> str:
    content = hashlib.sha256(repr(sorted(checkpoint.weight_hashes.items())).encode())
    content.update(f"{algorithm} {dtype} {recipe.model_dump_json()}".encode())
    for batch in batches:
        content.update(batch.token_ids.numpy().tobytes())
    return content.hexdigest()
