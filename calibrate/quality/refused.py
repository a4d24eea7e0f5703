"""Where it is kept what speaks against a model that was refused: no later stage takes it for one.

That is `<out>.refused`, beside `<out>`; of an entry of a Triton repository beside the repository,
`<repository>.refused/<entry>`, for a server that finds a directory in its repository which is no
model does not start. `<out>` and its evidence are never there together: what is written takes the
place of evidence of before.
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
    """Of what was to be `out`. ArtifactError for the root of the file system."""
    path = Path(os.path.abspath(out))
    if not path.name:
        raise ArtifactError(f"{out}: is the root directory; name one below it")
    return path.with_name(f"{path.name}.refused")


def refused_entry(entry: Path) -> Path:
    """Of what was to be an entry of a Triton repository."""
    path = Path(os.path.abspath(entry))
    return refused_directory(path.parent) / path.name


def check_refused(path: Path) -> None:
    """ArtifactError if evidence cannot be kept in `path`; call before expensive work."""
    if path.is_symlink():
        raise ArtifactError(
            f"{path}: is a symbolic link, where evidence of a gate is to be kept; move it away"
        )
    if path.exists() and not (path / EVIDENCE_FILE).is_file():
        raise ArtifactError(
            f"{path}: exists and is no evidence of a gate, which is to be kept there; move it away"
        )
    parent = next(parent for parent in path.parents if parent.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ArtifactError(
            f"{path}: evidence of a gate is to be kept there, and {parent} cannot be written to"
        )


@contextmanager
def keep_refused(path: Path) -> Iterator[Path]:
    """A directory to fill with evidence; it becomes `path` when the block ends, in place of an
    older one."""
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
    """Removes evidence of an earlier run, once what it was against is written."""
    if path.is_symlink() or not (path / EVIDENCE_FILE).is_file():
        return
    shutil.rmtree(path)
    parent = path.parent
    if parent.name.endswith(".refused") and not any(parent.iterdir()):
        parent.rmdir()
