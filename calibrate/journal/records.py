"""Small JSON files that are there whole or not at all, and that show when they were altered."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from calibrate.journal.activations import disk_error, flush
from octet.errors import ArtifactError

__all__ = ["altered", "read_json", "unreadable", "write_json"]


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes `content` with its own hash, and moves it into place behind all that is there."""
    temporary = path.with_name(f"{path.name}.partial")
    text = json.dumps(content, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    try:
        temporary.write_text(json.dumps({"content": content, "sha256": digest}, indent=1) + "\n")
        flush(temporary)
        flush(path.parent)
        os.replace(temporary, path)
        flush(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise disk_error(path, error) from None


def read_json(path: Path) -> dict[str, Any]:
    """What `write_json` was given; ArtifactError if it is not as it was written."""
    try:
        data = json.loads(path.read_text())
        content: dict[str, Any] = data["content"]
        text = json.dumps(content, sort_keys=True)
        if hashlib.sha256(text.encode()).hexdigest() != data["sha256"]:
            raise altered(path)
    except (OSError, ValueError, KeyError, TypeError):
        raise altered(path) from None
    return content


def unreadable(path: Path, error: OSError) -> ArtifactError:
    """What to say when `path` is there and the disk does not give it."""
    return ArtifactError(f"{path}: {error.strerror}; --restart begins anew")


def altered(path: Path) -> ArtifactError:
    """What to say when `path` is not what was written there."""
    return ArtifactError(
        f"{path}: altered since it was written (SHA-256 differs); --restart begins anew"
    )
