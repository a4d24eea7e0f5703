"""Exported checkpoints without weights."""

from pathlib import Path
from typing import Any

from octet.artifacts.manifest import Manifest, software, write_artifact
from octet.artifacts.provenance import ModelIdentity
from octet.model.checkpoint import Checkpoint
from octet.recipe import Recipe

__all__ = ["write_export"]


def write_export(
    path: Path,
    model: Path,
    name: str,
    serve_with: str = "--kv-cache-dtype fp8_e5m2",
    tensor_parallel: int = 2,
    **fields: Any,
) -> Manifest:
    """Writes an artifact with a configuration alone: a checkpoint, unless `fields` differ."""
    details = {"serve_with": serve_with, "tensor_parallel": tensor_parallel, "kv_cache": "e5m2"}
    with write_artifact(path) as writer:
        (writer.path / "config.json").write_text("{}")
        return writer.finish(
            Manifest(
                **{
                    "kind": "checkpoint",
                    "model": ModelIdentity.of(Checkpoint.open(model), name),
                    "recipe": Recipe.load("fp8"),
                    "details": details,
                    "software": software(),
                }
                | fields
            )
        )
