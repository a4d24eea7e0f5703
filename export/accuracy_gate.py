"""What may still refuse an export once it is whole, before it takes its place.

A `Judge` is told the directory that was filled, its manifest, and what it is to become; it returns
details for the manifest, or raises the OctetError of an export that must not be written. Whoever
calls for an export gives it: what an export costs is for another stage to say.
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
    """`writer.finish`; with a `judge`, once for it to read and again with what it says."""
    whole = writer.finish(manifest, hashes)
    if judge is None:
        return whole
    details = whole.details | judge(writer.path, whole, out)
    (writer.path / MANIFEST_FILE).unlink()
    return writer.finish(whole.model_copy(update={"details": details}), whole.files)
