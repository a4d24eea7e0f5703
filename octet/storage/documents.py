"""Reading a JSON file as a pydantic model, with one line for what is wrong with it."""

import json
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from octet.errors import ArtifactError

__all__ = ["read_document"]

Document = TypeVar("Document", bound=BaseModel)


def read_document(path: Path, kind: type[Document], what: str) -> Document:
    """The content of `path`. ArtifactError if it cannot be read, or is not `what` it should be."""
    try:
        return kind.model_validate(json.loads(path.read_text()))
    except OSError as error:
        raise ArtifactError(f"{path}: {error.strerror}") from None
    except (ValueError, ValidationError) as error:
        detail = str(error).splitlines()[0]
        raise ArtifactError(f"{path}: not {what} ({detail})") from None
