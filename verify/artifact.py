"""Implements `octet verify`: reloads an artifact and compares it with what it was made from.

| kind        | hashes | names and scales   | weights against the original | next tokens           |
|-------------|--------|--------------------|------------------------------|-----------------------|
| checkpoint  | yes    | yes                | every tensor                 | simulated             |
| onnx        | yes    | of the weights     | every initializer            | by the graph itself   |
| engine      | yes    | only the precision | a plan is not readable       | if the plan can run   |
| triton      | yes    | of the held model  | of the held model            | of the held model     |
| calibration | yes    | yes                | it has no weights            | it is their reference |
| pack        | yes    | no                 | it has no weights            | it is their reference |

`octet_cli/verify.py` adds the next tokens: running a model is the task of other stages.

A checkpoint without a manifest was written by another tool; `model` is compared with it.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from rich.console import Console

from octet.artifacts.manifest import MANIFEST_FILE, SCENARIOS_FILE, Manifest
from octet.artifacts.signature import SIGNATURE_FILE, require_signature
from octet.errors import ArtifactError, ConfigError
from octet.model.checkpoint import sha256_file
from octet.model.folding import describe_folds
from octet.progress import progress_bar
from octet.proof.reference import load_proofs
from verify.checks.calibration import verify_calibration
from verify.checks.checkpoint import verify_checkpoint
from verify.checks.engine import verify_engine
from verify.checks.findings import Verification
from verify.checks.original import Original, find_original
from verify.checks.side_files import check_side_files
from verify.checks.triton import check_entry, held_models
from verify.reader.checkpoint import is_checkpoint

__all__ = ["verify"]

Advance = Callable[[int], None]


def verify(
    path: Path | str,
    *,
    model: Path | None = None,
    calibration: Path | None = None,
    key: Path | None = None,
    console: Console | None = None,
) -> Verification:
    """Checks everything about the artifact or checkpoint at `path` that needs no forward pass.

    `model` is the original checkpoint, `calibration` what the export was made from; either allows
    comparing the weights. With the public key `key`, a signature by it is required. Raises an
    OctetError if nothing can be checked, or if the artifact was not made from the given original.
    """
    if "://" in str(path):
        raise ConfigError(
            f"{path}: a server, whose answers `octet verify URL` checks; give the directory of an"
            " export here"
        )
    path = Path(path)
    if not path.is_dir():
        what = "not a directory" if path.exists() else "no such directory"
        raise ConfigError(f"{path}: {what}; give what an export wrote")
    if (path / MANIFEST_FILE).is_file():
        if key is not None:
            require_signature(path, key)
        manifest = Manifest.load(path, verify=False)
    elif is_checkpoint(path):
        if key is not None:
            raise ConfigError(f"{path}: another tool's checkpoint has no {MANIFEST_FILE} to sign")
        return _of_others(path, model, calibration, console)
    else:
        inside = sorted(file.parent.name for file in path.glob(f"*/{MANIFEST_FILE}"))
        hint = f"; it holds {', '.join(inside)}: verify each by itself" if inside else ""
        raise ArtifactError(
            f"{path}: neither an Octet artifact (no {MANIFEST_FILE}) nor a checkpoint{hint}"
        )
    found = Verification(path, manifest.kind, manifest.kind)
    check_files(path, manifest, found)
    if (path / SIGNATURE_FILE).is_file():
        by = "; by whom is not checked without --key" if key is None else f" by {key}"
        found.notes.append(f"signed{by}")
    found.notes.extend(describe_folds(manifest.model.spec, manifest.folds))
    original = find_original(manifest, model, calibration)
    _verify_kind(path, manifest, original, found, console)
    return found


def _verify_kind(
    path: Path,
    manifest: Manifest,
    original: Original | None,
    found: Verification,
    console: Console | None,
) -> None:
    algorithm = manifest.details.get("algorithm")
    if algorithm is not None and original is not None and original.calibration is None:
        found.unchecked.append(
            f"numbers: {algorithm} changed the weights: give the calibration with --calibration"
        )
        original = None
    elif original is None and manifest.kind in ("checkpoint", "onnx", "triton"):
        found.unchecked.append(
            f"numbers: give the original {manifest.model.name} with --model, or the calibration"
            " with --calibration (a manifest holds hashes and no paths)"
        )
    found.original = original
    if manifest.kind in ("checkpoint", "onnx", "engine"):
        check_side_files(path, manifest, original, found)
    match manifest.kind:
        case "checkpoint":
            with _progress(console, original) as advance:
                verify_checkpoint(path, manifest, original, found, advance)
        case "onnx":
            with _progress(console, original) as advance:
                from verify.checks.onnx import verify_onnx  # loads onnx

                verify_onnx(path, manifest, original, found, advance)
        case "engine":
            verify_engine(path, manifest, original, found)
        case "triton":
            _verify_triton(path, manifest, original, found, console)
        case "calibration":
            verify_calibration(path, manifest, found)
        case "pack":
            _verify_pack(path, manifest, found)


def _verify_pack(path: Path, manifest: Manifest, found: Verification) -> None:
    """Checks that the files of a proof pack belong together."""
    checkpoint = manifest.details.get("checkpoint") or {}
    found.format = f"proof pack for {checkpoint.get('name')}, {manifest.details.get('format')}"
    if found.problems:
        return
    try:
        proofs = load_proofs(path)
    except ArtifactError as error:
        found.problem("files", path.name, str(error))
        return
    count = 0 if proofs.scenarios is None else len(proofs.scenarios.logprobs)
    found.notes.append(
        f"{len(proofs.golden.records)} golden records under {count} scenarios; it holds no weights"
    )


def _verify_triton(
    path: Path,
    manifest: Manifest,
    original: Original | None,
    found: Verification,
    console: Console | None,
) -> None:
    """Checks the entry itself, then the model it holds, which may be an artifact of its own."""
    check_entry(path, manifest, found)
    compared = False
    for held in held_models(path):
        inner = manifest
        if (held / MANIFEST_FILE).is_file():
            inner = Manifest.load(held, verify=False)
        elif (held / "model.onnx").is_file():
            details = {"target": "onnxruntime", **manifest.details}
            inner = manifest.model_copy(update={"kind": "onnx", "details": details})
        else:
            continue
        if inner.calibration != manifest.calibration:
            where = held.relative_to(path).as_posix()
            found.problem("files", where, "made from another calibration than the entry says")
        part = Verification(held, inner.kind, inner.kind)
        _verify_kind(held, inner, original, part, console)
        compared = True
        found.add(part, held.relative_to(path).as_posix())
        found.original = part.original
    if not compared:
        found.unchecked.append(
            f"numbers and next tokens: what the entry holds has no {MANIFEST_FILE} of its own"
        )


def _progress(
    console: Console | None, original: Original | None
) -> AbstractContextManager[Advance]:
    """Shows a progress bar over the elements of the model, if that is known."""
    sizes = () if original is None else map(math.prod, original.shapes.values())
    shown = None if original is None else console
    return progress_bar(shown, "Comparing", sum(sizes), "weights", transient=True)


def check_files(path: Path, manifest: Manifest, found: Verification) -> None:
    """Adds a problem for each file that is missing or altered, and a note for each unlisted one."""
    for name, digest in manifest.files.items():
        file = path / name
        if not file.is_file():
            found.problem("files", name, f"missing; {MANIFEST_FILE} lists it")
        elif sha256_file(file) != digest:
            found.problem("files", name, "altered since it was written (SHA-256 differs)")
    if SCENARIOS_FILE not in manifest.files:
        found.notes.append(
            f"no {SCENARIOS_FILE} (--no-predict, or an architecture that Octet does not know): a"
            " server of it can only be weakly proven"
        )
    listed = {*manifest.files, MANIFEST_FILE, SIGNATURE_FILE}
    for file in sorted(path.rglob("*")):
        name = file.relative_to(path).as_posix()
        if file.is_file() and name not in listed:
            found.notes.append(f"{name}: not listed in {MANIFEST_FILE}, added afterwards")


def _of_others(
    path: Path, model: Path | None, calibration: Path | None, console: Console | None
) -> Verification:
    """Verifies a checkpoint without a manifest."""
    found = Verification(path, "checkpoint", "", made_by="others")
    original = find_original(None, model, calibration)
    if original is None:
        found.unchecked.append("numbers: give the original with --model")
    found.notes.append(
        "no manifest and no golden records: hashes and the divergence of next tokens are left out"
    )
    check_side_files(path, None, original, found)
    with _progress(console, original) as advance:
        verify_checkpoint(path, None, original, found, advance)
    return found
