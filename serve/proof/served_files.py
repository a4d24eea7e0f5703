"""Compares the checkpoint that a server reports as loaded with the artifact, if readable here.

Log-probabilities do not show every fault: a lost `k_scale` of 0.9 changes no token, but is found
missing here. Manifests, tensor names and scales are read. Small files are hashed; large ones are
left to `octet verify --checkpoint`.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octet.artifacts.manifest import MANIFEST_FILE, Manifest
from octet.errors import ArtifactError, CheckpointError
from octet.proof.reference import Proofs
from octet.storage.files import open_file, sha256_file
from octet.storage.tensors import TensorFile

__all__ = ["differences"]

_HASHED_BYTES = 64 << 20  # a file up to this is hashed: 50 ms
# A process reads its weights at least this long after its start. This is also longer than the error
# of the start time, which may appear too early: Linux reports the boot time in whole seconds.
_STARTING_S = 2.0
_SHOWN = 2  # names of differing tensors per line
_CACHE = re.compile(r"(.*\.self_attn)\.(?:[kv]_proj\.)?([kv])_scale$")
_SCALE = re.compile(r"scale(_inv|_2)?$")

Scales = dict[str, NDArray[np.float32]]


def differences(
    root: Path, directory: Path, proofs: Proofs, *, trusted: bool, since: float | None = None
) -> list[str]:
    """Lists how the checkpoint at `root` differs from the artifact in `directory`, a line each.

    Without `trusted`, `root` may be a path on another machine, and this one may hold something else
    there: then only an artifact of the same origin counts as the served one. A file written
    after `since` (the server's start, in seconds since 1970) is not what it loaded, and a file that
    only another user may read is unknown: neither counts as a difference.
    """
    if not _shows_loaded(root, since):
        return []
    if proofs.manifest.kind == "pack":
        return _of_pack(root, proofs, trusted=trusted)
    try:
        manifest = Manifest.load(root, verify=False) if (root / MANIFEST_FILE).is_file() else None
    except ArtifactError:
        return ["the manifest of the checkpoint that it loaded was altered"] if trusted else []
    related = manifest is not None and _related(manifest, proofs.manifest, proofs.identity)
    if not related and not trusted:
        return []
    if manifest is not None and not related:
        return [
            f"it loaded another artifact, {manifest.identity[:12]} ({manifest.model.name},"
            f" {manifest.recipe.name}), than {proofs.identity[:12]} ({proofs.manifest.model.name},"
            f" {proofs.recipe.name})"
        ]
    try:
        altered = () if manifest is None else _altered(root, manifest)
        return [*altered, *_scales(root, manifest, directory, proofs)]
    except CheckpointError as error:
        line = str(error).replace(str(root), "its checkpoint")
        return [f"the checkpoint that it loaded cannot be read: {line}"]


def _of_pack(root: Path, proofs: Proofs, *, trusted: bool) -> list[str]:
    """Compares the checkpoint at `root` with the one that a proof pack was made for, by hashes."""
    recorded = proofs.manifest.details.get("checkpoint", {})
    files: dict[str, str] = recorded.get("files", {})
    if not trusted and not _is(root / "config.json", files.get("config.json")):
        return []
    held = {path.name for path in root.glob("*.safetensors")}
    wrong = [
        name
        for name, digest in files.items()
        if not (root / name).is_file()
        or ((root / name).stat().st_size <= _HASHED_BYTES and not _is(root / name, digest))
    ]
    wrong += sorted(held - files.keys())
    if not wrong:
        return []
    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return [
        f"the checkpoint that it loaded is not the {recorded.get('name')} that the proof pack was"
        f" made for: {wrong[0]}{more} (SHA-256); make a pack of it with octet golden"
    ]


def _is(path: Path, digest: str | None) -> bool:
    return path.is_file() and sha256_file(path) == digest


def _shows_loaded(root: Path, since: float | None) -> bool:
    """Returns whether `root` holds a readable checkpoint that existed when the server started."""
    try:
        if not root.is_dir() or not any(root.glob("*.safetensors")):
            return False
        for path in (*root.glob("*.safetensors"), root / "config.json", root / MANIFEST_FILE):
            if path.exists():
                open_file(path).close()
                if since is not None and path.stat().st_mtime > since + _STARTING_S:
                    return False
    except OSError:
        return False
    return True


def _is_still(directory: Path, proofs: Proofs) -> bool:
    """Returns whether `directory` still holds the artifact that `proofs` belong to."""
    try:
        return Manifest.load(directory, verify=False).identity == proofs.identity
    except ArtifactError:
        return False


def _related(served: Manifest, manifest: Manifest, identity: str) -> bool:
    """Returns whether both are the same artifact, or come from the same calibration."""
    theirs = {served.identity, served.calibration} - {None}
    return bool(theirs & {identity, manifest.calibration})


def _altered(root: Path, manifest: Manifest) -> Iterator[str]:
    for name, digest in manifest.files.items():
        path = root / name
        if path.suffix != ".safetensors" and name != "config.json":
            continue
        if not path.is_file():
            yield f"{name} of the checkpoint that it loaded is missing"
        elif path.stat().st_size <= _HASHED_BYTES and sha256_file(path) != digest:
            yield f"{name} of the checkpoint that it loaded is not as it was exported (SHA-256)"


def _scales(root: Path, served: Manifest | None, directory: Path, proofs: Proofs) -> list[str]:
    ours = proofs.manifest
    theirs = _read(root)
    if proofs.weights == "quantized" and not theirs:
        return ["the checkpoint that it loaded has no scales: its weights are not quantized"]
    if not _is_still(directory, proofs):
        return []
    formats = {str(m.details.get("format")) for m in (ours, served) if m is not None}
    try:
        if ours.kind == "calibration":
            return [*_differing(_cache_scales(directory, proofs), _by_role(theirs), implied=True)]
        if ours.kind == "checkpoint" and len(formats) == 1:
            return [*_differing(_read(directory), theirs, implied=False)]
    except CheckpointError:  # the artifact was damaged since; that proves nothing about the server
        pass
    return []


def _read(directory: Path) -> Scales:
    """Reads every scale of a checkpoint."""
    found: Scales = {}
    for path in sorted(directory.glob("*.safetensors")):
        file = TensorFile.open(path)
        for name in filter(_SCALE.search, file.names):
            found[name] = file.read(name).float32()
    return found


def _cache_scales(directory: Path, proofs: Proofs) -> Scales:
    """Reads a calibration's scales for the declared cache, by role; none for a 16-bit cache."""
    path = directory / "scales.safetensors"
    if proofs.kv_cache == "float16" or not path.is_file():
        return {}
    file = TensorFile.open(path)
    suffix = f"_scale_{proofs.kv_cache}"
    names = [name for name in file.names if name.endswith((f".k{suffix}", f".v{suffix}"))]
    return {name.removesuffix(f"_{proofs.kv_cache}"): file.read(name).float32() for name in names}


def _by_role(scales: Scales) -> Scales:
    """Selects the cache's scales, under one name whatever the checkpoint's dialect."""
    matches = ((_CACHE.match(name), value) for name, value in scales.items())
    return {f"{match[1]}.{match[2]}_scale": value for match, value in matches if match}


def _differing(ours: Scales, theirs: Scales, *, implied: bool) -> Iterator[str]:
    """Describes missing and different scales; `implied`: a scale that is not stored is 1."""
    missing = [
        name
        for name, value in ours.items()
        if name not in theirs and not (implied and (value == 1).all())
    ]
    other = [
        name for name, value in ours.items() if name in theirs and not _equal(value, theirs[name])
    ]
    for names, problem in ((missing, "lacks"), (other, "has other values of")):
        for kind in sorted({name.rpartition(".")[2] for name in names}):
            some = [name for name in names if name.endswith(f".{kind}")]
            shown = ", ".join(some[:_SHOWN]) + (", ..." if len(some) > _SHOWN else "")
            yield (
                f"the checkpoint that it loaded {problem} {len(some)} {kind}"
                f" tensor{'s' if len(some) > 1 else ''} ({shown})"
            )


def _equal(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> bool:
    return ours.size == theirs.size and np.array_equal(ours.ravel(), theirs.ravel())
