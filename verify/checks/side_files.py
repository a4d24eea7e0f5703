"""Verifies the files beside the weights: configuration, tokenizer, golden records."""

from pathlib import Path
from typing import Any

from octet.artifacts.golden import GOLDEN_FILE
from octet.artifacts.manifest import Manifest
from octet.artifacts.scenarios import SCENARIOS_FILE
from octet.artifacts.serving_path import EXPECTED_FILE
from octet.errors import CheckpointError
from octet.storage.files import read_object
from verify.checks.findings import Verification
from verify.checks.original import Original

__all__ = ["check_side_files"]

# Keys that a tool may change without changing what the model computes.
_FREE = {
    "quantization_config",
    "transformers_version",
    "_name_or_path",
    "dtype",
    "torch_dtype",
    "use_cache",
    "architectures",
}


def check_side_files(
    path: Path, manifest: Manifest | None, original: Original | None, found: Verification
) -> None:
    """Adds to `found` each file that is not the original's or the calibration's."""
    if manifest is not None:
        for name, digest in manifest.model.tokenizer.items():
            if name not in manifest.files:
                found.problem("files", name, "missing: the original's tokenizer has it")
            elif manifest.files[name] != digest:
                found.problem("files", name, "is not the original's tokenizer")
        for name, what in manifest.model.side_changes(path):
            if name not in manifest.model.tokenizer:  # else it is named above
                found.problem("files", name, what)
    if original is None:
        return
    _check_config(path, manifest is not None, original, found)
    calibration = original.calibration
    if manifest is None or calibration is None:
        return
    names = [GOLDEN_FILE, SCENARIOS_FILE]
    if manifest.details.get("quantized", True):  # the recipe's cost, which others do not have
        names.append(EXPECTED_FILE)
    for name in names:
        if calibration.manifest.files.get(name) != manifest.files.get(name):
            found.problem("files", name, "is not the calibration's")


def _check_config(path: Path, ours: bool, original: Original, found: Verification) -> None:
    """Compares config.json: all keys in Octet's files, in those of others the shared keys."""
    try:
        written = read_object(path / "config.json", CheckpointError)
    except CheckpointError as error:
        found.problem("files", "config.json", f"cannot be read: {error}")
        return
    before: dict[str, Any] = original.checkpoint.config
    keys = before.keys() | written.keys() if ours else before.keys() & written.keys() - _FREE
    for key in sorted(keys - {"quantization_config"}):
        if before.get(key) != written.get(key):
            what = f"{key} is {written.get(key)!r}, and {before.get(key)!r} in the original"
            found.problem("configuration", "config.json", what)
