"""Writes the report of a failed accuracy gate where no later stage mistakes it for a model.

That is `<out>.refused`, beside `<out>`. For an entry of a Triton repository it is
`<repository>.refused/<entry>`, beside the repository: a server does not start if its repository
holds a directory that is not a model. Writing `<out>` removes the report of an earlier run.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from octet.artifacts.manifest import move_into_place
from octet.errors import ArtifactError

__all__ = [
    "EVIDENCE_FILE",
    "check_refused",
    "drop_refused",
    "keep_refused",
    "refused_directory",
    "refused_entry",
]

EVIDENCE_FILE = "gate.json"


def refused_directory(out: Path) -> Path:
    """Returns `<out>.refused`. Raises ArtifactError for the root of the file system."""
    path = Path(os.path.abspath(out))
    if not path.name:
        raise ArtifactError(f"{out}: is the root directory; name one below it")
    return path.with_name(f"{path.name}.refused")


def refused_entry(entry: Path) -> Path:
    """Returns `<repository>.refused/<entry>` for an entry of a Triton repository."""
    path = Path(os.path.abspath(entry))
    return refused_directory(path.parent) / path.name


def check_refused(path: Path) -> None:
    """Raises ArtifactError if a report cannot be kept in `path`; call before expensive work."""
    if path.is_symlink():
        raise ArtifactError(
            f"{path}: is a symbolic link, but a failed gate would write its report there; move it"
            " away"
        )
    if path.exists() and not (path / EVIDENCE_FILE).is_file():
        raise ArtifactError(
            f"{path}: exists and is no report of a failed gate, which would be written there; move"
            " it away"
        )
    parent = next(parent for parent in path.parents if parent.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ArtifactError(
            f"{path}: a failed gate would write its report there, and {parent} cannot be written to"
        )


@contextmanager
def keep_refused(path: Path) -> Iterator[Path]:
    """Yields a directory to fill with the report; it replaces `path` when the block ends."""
    check_refused(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield staging
        staging.chmod(0o755)
        move_into_place(staging, path)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def drop_refused(path: Path) -> None:
    """Removes the report of an earlier run, once the artifact is written."""
    if path.is_symlink() or not (path / EVIDENCE_FILE).is_file():
        return
    shutil.rmtree(path)
    parent = path.parent
    if parent.name.endswith(".refused") and not any(parent.iterdir()):
        parent.rmdir()
