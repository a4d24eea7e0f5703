"""Lets the caller refuse an export once it is complete, before it moves to its destination.

A `Judge` receives the directory that was filled, its manifest, and the destination. It returns
details for the manifest, or raises an OctetError for an export that must not be written. The caller
of the export passes it in, because another stage measures what an export costs.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from octet.artifacts.manifest import MANIFEST_FILE, ArtifactWriter, Manifest

__all__ = ["Judge", "finish"]

Judge: TypeAlias = Callable[[Path, Manifest, Path], dict[str, Any]]


def finish(
    writer: ArtifactWriter,
    manifest: Manifest,
    out: Path,
    judge: Judge | None,
    hashes: Mapping[str, str] | None = None,
) -> Manifest:
    """Runs `writer.finish`; with a `judge`, first for it to read, then again with its details."""
    whole = writer.finish(manifest, hashes)
    if judge is None:
        return whole
    details = whole.details | judge(writer.path, whole, out)
    (writer.path / MANIFEST_FILE).unlink()
    return writer.finish(whole.model_copy(update={"details": details}), whole.files)
