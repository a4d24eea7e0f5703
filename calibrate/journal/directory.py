"""Manages the directory of a journal: locks it, recognises the journal's files and removes them.

If the process stops at any moment, the directory holds either a journal that can be opened, or
remains without a head, which the next journal there removes.

Its records are small JSON files. They appear atomically and carry a hash that reveals changes.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from calibrate.journal.activations import ActivationFiles, disk_error, flush
from octet.errors import ArtifactError, OctetError
from octet.storage import files

__all__ = [
    "HEAD",
    "KEPT",
    "altered",
    "clear_activations",
    "discard_contents",
    "flush_activations",
    "forget_activations",
    "lock_directory",
    "make_directory",
    "read_json",
    "remove",
    "remove_remains",
    "unreadable",
    "write_json",
]


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes `content` with its own hash, and moves it into place after the files already there."""
    temporary = path.with_name(f"{path.name}.partial")
    text = json.dumps(content, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    try:
        temporary.write_text(
            json.dumps({"content": content, "sha256": digest}, indent=1) + "\n", "utf-8"
        )
        flush(temporary)
        flush(path.parent)
        os.replace(temporary, path)
        flush(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise disk_error(path, error) from None


def read_json(path: Path) -> dict[str, Any]:
    """Returns what `write_json` wrote; raises ArtifactError if it was altered."""
    try:
        data = files.read_json(path)
        content: dict[str, Any] = data["content"]
        text = json.dumps(content, sort_keys=True)
        if hashlib.sha256(text.encode()).hexdigest() != data["sha256"]:
            raise altered(path)
    except (OSError, ValueError, KeyError, TypeError):
        raise altered(path) from None
    return content


def unreadable(path: Path, error: OSError) -> ArtifactError:
    """Returns the error to raise when `path` exists but cannot be read from the disk."""
    return ArtifactError(f"{path}: {error.strerror}; --restart begins anew")


def altered(path: Path) -> ArtifactError:
    """Returns the error to raise when `path` is not what was written there."""
    return ArtifactError(
        f"{path}: altered since it was written (SHA-256 differs); --restart begins anew"
    )


HEAD, KEPT = "journal.json", "kept.json"

# Files that may remain if the process dies while a journal is begun or discarded.
_OWN = re.compile(
    r"lock|((journal|kept|layer-\d+)\.json|layer-\d+\.safetensors)(\.partial)?|activations-\d+"
)


def lock_directory(path: Path) -> IO[str]:
    """Locks the directory, made if need be, for this process until the file is closed."""
    begun = path.is_dir() and (
        (path / HEAD).exists() or all(_OWN.fullmatch(x.name) for x in path.iterdir())
    )
    if path.exists() and not begun:
        raise ArtifactError(f"{path}: exists and is not a journal; choose another")
    make_directory(path)
    try:
        lock = (path / "lock").open("w")
    except OSError as error:
        raise disk_error(path / "lock", error) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise ArtifactError(f"{path}: another process is calibrating with this journal") from None
    return lock


def make_directory(path: Path) -> None:
    """Creates the directory `path`; raises ArtifactError if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(path, error) from None


def flush_activations(directory: Path, batches: Iterable[int]) -> None:
    """Flushes the activations of `batches`, and their names, to the disk."""
    try:
        for batch in batches:
            flush(ActivationFiles.path(directory, batch))
        flush(directory)
        flush(directory.parent)
    except OSError as error:
        raise disk_error(directory, error) from None


def discard_contents(path: Path) -> None:
    """Discards the journal in `path`, but keeps its lock."""
    forget_activations(path)
    (path / HEAD).unlink(missing_ok=True)  # without it, the rest is no journal
    remove_remains(path)


def remove_remains(path: Path) -> None:
    """Removes what is left in `path` of a journal without a head."""
    remove(x for x in path.iterdir() if _OWN.fullmatch(x.name))


def forget_activations(path: Path) -> None:
    """Removes the activations of the journal in `path`, wherever they are."""
    try:
        places = read_json(path / HEAD)["activations"]
    except (OctetError, KeyError):
        places = ["."]
    (path / KEPT).unlink(missing_ok=True)  # first: it names what is removed next
    for place in places:
        clear_activations(path / place)


def clear_activations(place: Path, kept: Path | None = None) -> None:
    """Removes the activations in `place` except `kept`, and `place` itself if it is empty."""
    for directory in sorted(place.glob("activations-*")):
        if directory != kept:
            shutil.rmtree(directory, ignore_errors=True)
    with suppress(OSError):
        place.rmdir()


def remove(paths: Iterable[Path]) -> None:
    """Removes files and directories, except the lock."""
    for path in list(paths):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != "lock":
            path.unlink(missing_ok=True)
