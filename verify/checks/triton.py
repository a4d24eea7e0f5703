"""Verifies Triton's own files in an entry of a model repository, not the model that it holds."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from octet.artifacts.manifest import MANIFEST_FILE, PLAN_FILE, Manifest
from octet.storage.files import read_file, read_json
from verify.checks.findings import Verification

__all__ = ["check_entry", "held_models"]

CONFIG_FILE = "config.pbtxt"


def check_entry(path: Path, manifest: Manifest, found: Verification) -> None:
    """Adds to `found` what Triton would refuse or serve differently in the entry at `path`."""
    backend = str(manifest.details.get("backend", "?"))
    found.format = f"{backend} backend"
    config = path / CONFIG_FILE
    if not config.is_file():
        found.problem("files", CONFIG_FILE, "missing: Triton would guess a configuration")
    else:
        text = read_file(config).decode("utf-8", "replace")
        named = re.search(r'^\s*name\s*:\s*"([^"]*)"', text, re.MULTILINE)
        recorded = manifest.details.get("name")
        if named is not None and recorded is not None and named.group(1) != recorded:
            found.problem(
                "configuration",
                CONFIG_FILE,
                f"names the model '{named.group(1)}', the manifest '{recorded}'",
            )
        if named is not None and named.group(1) != path.absolute().name:
            found.problem(
                "configuration",
                CONFIG_FILE,
                f"names the model '{named.group(1)}': Triton wants the directory named so",
            )
    versions = [child for child in path.iterdir() if child.is_dir() and child.name.isdigit()]
    if not versions:
        found.problem("files", path.name, "holds no version: Triton wants a directory `1`")
    for version in versions:
        _check_vllm(version, found)


def held_models(path: Path) -> Iterator[Path]:
    """Yields the directories of the entry at `path` that hold a model."""
    for version in sorted(child for child in path.iterdir() if child.name.isdigit()):
        for directory in (version, *sorted(version.iterdir())):
            files = (MANIFEST_FILE, "model.onnx", PLAN_FILE)
            if directory.is_dir() and any((directory / name).is_file() for name in files):
                yield directory


def _check_vllm(version: Path, found: Verification) -> None:
    """Checks that the engine's cache has the format that the checkpoint's scales are for."""
    file = version / "model.json"
    if not file.is_file():
        return
    where = f"{version.name}/model.json"
    try:
        engine = read_json(file)
        config = read_json(version / "checkpoint" / "config.json")
    except (OSError, ValueError) as error:
        found.problem("files", where, f"cannot be read with its checkpoint: {error}")
        return
    declared = _quantization(config).get("kv_cache_scheme") is not None
    if declared and engine.get("kv_cache_dtype") == "fp8_e5m2":
        what = "and config.json has a kv_cache_scheme: vLLM refuses the two together"
        found.problem("configuration", where, f"kv_cache_dtype fp8_e5m2, {what}")


def _quantization(config: Any) -> dict[str, Any]:
    found = config.get("quantization_config") if isinstance(config, dict) else None
    return found if isinstance(found, dict) else {}
