"""Artifact directories: a manifest with content hashes, written atomically.

Every directory that a stage hands to the next holds `manifest.json`, a `Manifest` with the sources
of the artifact and the SHA-256 of each file in it. A reader checks the hashes, and names the first
file that is wrong.
"""

import errno
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
)

from octet.artifacts.provenance import ModelIdentity, SampleSet
from octet.artifacts.serving_path import EXPECTED_FILE
from octet.errors import ArtifactError, OctetError
from octet.model.folding import Folds
from octet.recipe import Recipe
from octet.storage.files import read_json, refuse_newer, sha256_file

__all__ = [
    "MANIFEST_FILE",
    "PLAN_FILE",
    "SCENARIOS_FILE",
    "Manifest",
    "move_into_place",
    "software",
    "write_artifact",
]

MANIFEST_FILE = "manifest.json"
PLAN_FILE = "model.plan"  # the TensorRT plan of an engine artifact
# Not *.safetensors: vLLM loads every such file beside a checkpoint as part of it.
SCENARIOS_FILE = "hypotheses.octet"
SCHEMA_VERSION = 1
Kind = Literal["calibration", "checkpoint", "onnx", "engine", "triton", "pack"]
_COMMANDS: Mapping[Kind, str] = {  # the command that writes each kind
    "calibration": "octet calibrate",
    "checkpoint": "octet export checkpoint",
    "onnx": "octet export onnx",
    "engine": "octet build-engine",
    "triton": "octet export triton",
    "pack": "octet golden",
}
_NAMES: Mapping[Kind, str] = {
    "calibration": "a calibration",
    "checkpoint": "a checkpoint",
    "onnx": "an ONNX export",
    "engine": "an engine",
    "triton": "a Triton entry",
    "pack": "a proof pack",
}
# What readers rely on of the values in `details`.
_KINDS: Mapping[str, type | tuple[type, ...]] = {
    "algorithm": (str, dict),
    "checkpoint": dict,
    "gate": list,
    "kv_cache": (str, dict),
    "predicted": bool,
    "runs_weight_only": list,
    "serve_with": str,
    "source": str,
    "targets": list,
    "tensor_parallel": int,
    "warnings": list,
}
_WRITERS = "give what octet calibrate, octet export or octet build-engine wrote"
_AGAIN = "copy it again from where it was made, or make it again"


class Manifest(BaseModel):
    """The content of `manifest.json`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    kind: Kind
    model: ModelIdentity
    recipe: Recipe
    samples: SampleSet | None = None
    calibration: str | None = None  # identity of the calibration that was exported
    # Facts specific to one kind: an engine's targets, an ONNX file's opset, scale choices.
    details: dict[str, Any] = Field(default_factory=dict)
    software: dict[str, str]
    files: dict[str, str] = Field(default_factory=dict)  # relative path -> SHA-256

    @field_validator("details")
    @classmethod
    def _of_kinds(cls, details: dict[str, Any]) -> dict[str, Any]:
        for name, kind in _KINDS.items():
            if not isinstance(details.get(name), (kind, type(None))):
                raise ValueError(f"{name} is of another kind")
        try:
            TypeAdapter(Folds).validate_python(details.get("folded", {}))
        except ValidationError:
            raise ValueError("folded is no power of two of each layer's K and V") from None
        return details

    @property
    def folds(self) -> Folds:
        """The powers of two that were folded into the weights in place of cache scales."""
        folds: Folds = self.details.get("folded", {})
        return folds

    @property
    def runs_weight_only(self) -> tuple[str, ...]:
        """The schemes that were measured, and trained, with activations that are not rounded."""
        return tuple(self.details.get("runs_weight_only", ()))

    # The hash of the file as read: it may have fewer fields than this release's Manifest.
    recorded_identity: str | None = Field(default=None, exclude=True)

    @property
    def identity(self) -> str:
        """A hash of the whole artifact: the manifest's fields and, through `files`, every byte."""
        return self.recorded_identity or _hash(self.model_dump(mode="json"))

    @property
    def predicted(self) -> bool:
        """Returns whether the artifact was written with the log-probabilities of its scenarios.

        Artifacts of 0.2 do not record it. Their expected divergences came with it, and calibrations
        recorded what computed it.
        """
        recorded = self.details.get("predicted")
        if recorded is not None:
            return bool(recorded)
        if "prediction" in self.details and not self.model.spec.generic:
            return True
        return "expected_divergence" in self.details or EXPECTED_FILE in self.files

    @property
    def remedy(self) -> str:
        """The advice for an artifact with a missing or altered file."""
        return f"{_AGAIN} with {_COMMANDS[self.kind]}"

    @classmethod
    def load(cls, directory: Path, kind: Kind | None = None, *, verify: bool = True) -> Self:
        """Reads and checks the manifest of `directory`; with `verify`, also every file's hash.

        Raises ArtifactError naming the file for anything missing, altered, of another kind or of a
        schema version that this release does not read.
        """
        path = directory / MANIFEST_FILE
        writers = _WRITERS if kind is None else f"give what {_COMMANDS[kind]} wrote"
        if not directory.is_dir():
            what = "not a directory" if directory.exists() else "no such directory"
            raise ArtifactError(f"{directory}: {what}; {writers}")
        try:
            data = read_json(path)
        except FileNotFoundError:
            raise ArtifactError(
                f"{directory}: not an Octet artifact (no {MANIFEST_FILE}); {writers}"
            ) from None
        except OSError as error:
            raise ArtifactError(f"{path}: {error.strerror}") from None
        except ValueError as error:
            raise ArtifactError(
                f"{path}: altered since it was written (not valid JSON: {error}); {_AGAIN}"
            ) from None
        version = data.get("schema_version") if isinstance(data, dict) else None
        refuse_newer(path, version, SCHEMA_VERSION)
        if version != SCHEMA_VERSION:
            raise ArtifactError(
                f"{path}: schema version {version!r}; this release reads {SCHEMA_VERSION}: use the"
                " release that wrote it, or make it again with this one"
            )
        identity = data.pop("identity", None)
        try:
            manifest = cls.model_validate(data | {"recorded_identity": None})
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ArtifactError(f"{path}: {where}: {first['msg']}; {_AGAIN}") from None
        if identity != _hash(data):
            raise ArtifactError(
                f"{path}: altered since it was written (its own hash differs); {manifest.remedy}"
            )
        for name in manifest.files:
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise ArtifactError(f"{path}: lists {name}, which is not in it; {manifest.remedy}")
        if manifest.predicted and SCENARIOS_FILE not in manifest.files:
            raise ArtifactError(
                f"{directory / SCENARIOS_FILE}: missing; {MANIFEST_FILE} does not list it, but the"
                f" artifact was written with it; {manifest.remedy}"
            )
        manifest = manifest.model_copy(update={"recorded_identity": identity})
        if kind is not None and manifest.kind != kind:
            raise ArtifactError(
                f"{directory}: is {_NAMES[manifest.kind]}, not {_NAMES[kind]}; {writers}"
            )
        if verify:
            manifest.verify(directory)
        return manifest

    def verify(self, directory: Path) -> None:
        """Raises ArtifactError naming the first file that is missing or altered."""
        for name in self.files:
            self.verify_file(directory, name)

    def verify_file(self, directory: Path, name: str) -> None:
        """Raises ArtifactError if the file `name`, which must be listed, is missing or altered."""
        path = directory / name
        if not path.is_file():
            raise ArtifactError(f"{path}: missing; {MANIFEST_FILE} lists it; {self.remedy}")
        try:
            altered = sha256_file(path) != self.files[name]
        except OSError as error:
            raise ArtifactError(f"{path}: {error.strerror}") from None
        if altered:
            raise ArtifactError(
                f"{path}: altered since it was written (SHA-256 differs); {self.remedy}"
            )


def software(*packages: str) -> dict[str, str]:
    """Returns the versions of Python, Octet and the installed ones of `packages`."""
    from octet import __version__

    found = {"python": platform.python_version(), "octet": __version__}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _hash(content: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of `content` as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@contextmanager
def write_artifact(
    destination: Path, *, force: bool = False, kind: Kind | None = None
) -> Iterator["ArtifactWriter"]:
    """Yields a writer for a staging directory, which becomes `destination` at the block's end.

    If the block raises, the staging directory is removed. Raises ArtifactError at once if
    `destination` may not be written: see `check_destination`, and for a full disk. In an OctetError
    that the block raises, `destination` replaces the path of the staging directory.
    """
    named, destination = destination, destination.absolute()
    check_destination(destination, force=force, kind=kind)
    destination.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
    writer = ArtifactWriter(staging)
    try:
        yield writer
        if writer.manifest is None:
            raise RuntimeError("the artifact was left without a manifest")
        move_into_place(staging, destination)
    except OctetError as error:
        error.args = (str(error).replace(str(staging), str(named)),)
        raise
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ArtifactError(
            f"{named}: no space left on the disk; free some and run the same command again, or name"
            " another directory (nothing half-written is left there)"
        ) from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def check_destination(
    destination: Path,
    *,
    force: bool,
    inputs: Sequence[Path] = (),
    kind: Kind | None = None,
) -> None:
    """Raises ArtifactError if `destination` may not be written; call before expensive work.

    An existing artifact is replaced only with `force`. Even then, three are never replaced: what is
    not an Octet artifact; `inputs`, which the work reads; and a calibration, which may have taken
    hours, unless `kind` is "calibration" too.
    """
    if destination.is_symlink():
        raise ArtifactError(f"{destination}: is a symbolic link; name the directory itself")
    if not destination.exists():
        parent = next(path for path in destination.absolute().parents if path.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            raise ArtifactError(f"{destination}: {parent} is no directory that can be written to")
        return
    if destination.is_dir() and not any(destination.iterdir()):
        return
    if not (destination / MANIFEST_FILE).is_file():
        raise ArtifactError(f"{destination}: exists and is not an Octet artifact; choose another")
    if not force:
        raise ArtifactError(f"{destination}: exists already; add --force to replace it")
    if kind != "calibration" and _kind_of(destination) == "calibration":
        raise ArtifactError(f"{destination}: is a calibration, which --force keeps; choose another")
    for path in inputs:
        if path.resolve().is_relative_to(destination.resolve()):
            raise ArtifactError(
                f"{destination}: would replace {path}, which is read; choose another"
            )


def _kind_of(directory: Path) -> Any:
    """Returns the kind in the manifest of `directory`; None if it cannot be read."""
    try:
        return read_json(directory / MANIFEST_FILE)["kind"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


class ArtifactWriter:
    """The staging directory of an artifact; `manifest` is set once `finish` has written it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest: Manifest | None = None

    def finish(self, manifest: Manifest, hashes: Mapping[str, str] | None = None) -> Manifest:
        """Hashes every file written so far, writes the manifest and returns it complete.

        `hashes`, by path relative to the artifact, were computed while writing, from the intended
        bytes. A file that the disk has altered since will therefore not match.
        """
        os.chmod(self.path, 0o755)  # otherwise mkdtemp's 0700 would remain after the move
        known = hashes or {}
        files = {}
        for path in sorted(self.path.rglob("*")):
            if path.is_file():
                name = path.relative_to(self.path).as_posix()
                files[name] = known.get(name) or sha256_file(path)
        whole = manifest.model_copy(update={"files": files, "recorded_identity": None})
        content = whole.model_dump(mode="json") | {"identity": whole.identity}
        self.manifest = whole.model_copy(update={"recorded_identity": whole.identity})
        (self.path / MANIFEST_FILE).write_text(json.dumps(content, indent=2) + "\n", "utf-8")
        return self.manifest


def move_into_place(staging: Path, destination: Path) -> None:
    """Renames `staging` to `destination`; restores an existing `destination` on failure."""
    if not destination.exists():
        os.replace(staging, destination)
        return
    retired = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
    try:
        os.replace(destination, retired / "old")
        try:
            os.replace(staging, destination)
        except BaseException:
            os.replace(retired / "old", destination)
            raise
    finally:
        shutil.rmtree(retired, ignore_errors=True)
