"""Turns a file into a checked configuration, or into an error of one line."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from octet.errors import ConfigError
from serve.config.backends import BackendConfig, HttpConfig
from serve.config.document import Document, Problem
from serve.config.pools import DnsDiscovery
from serve.config.problems import key_path, lines, one_line, problems_of
from serve.config.section import Section

__all__ = ["Refused", "load", "load_backends", "refuse", "validated"]

T = TypeVar("T")


class Refused(ConfigError):
    """A file with problems: the message has the first, `lines` has all of them."""

    def __init__(self, path: Path, first: str, lines: Sequence[str]) -> None:
        super().__init__(f"configuration {path}: {first}")
        self.lines = [f"configuration {path}: {line}" for line in lines]


def load(path: Path, form: type[T], root: type[Section]) -> T:
    """Loads a file as `validated` does, and also refuses variables that are not set."""
    document = Document.read(path)
    value = validated(path, document, form, root)
    refuse(path, document, document.problems)
    return value


def load_backends(path: Path) -> tuple[BackendConfig, ...]:
    """Loads a file with a list of backends, each name at most once. Raises ConfigError."""
    document = Document.read(path)
    backends = validated(path, document, tuple[BackendConfig, ...], HttpConfig)
    names = [backend.name for backend in backends]
    twice = [
        ((i, "name"), f"'{name}' is there twice")
        for i, name in enumerate(names)
        if name is not None and name in names[:i]
    ]
    refuse(path, document, [*document.problems, *twice])
    return backends


def validated(path: Path, document: Document, form: type[T], root: type[Section]) -> T:
    """Converts `document` to a `form` of `root` sections; paths are relative to `path`'s directory.

    Raises ConfigError.
    """
    try:
        value = TypeAdapter(form).validate_python(document.data)
    except ValidationError as error:
        # Report a variable that is not set, not the value that then stands in its place.
        unset = {key_path(loc, document.data) for loc, _ in document.problems}
        found = [
            (loc, message)
            for loc, message in problems_of(error, root)
            if key_path(loc, document.data) not in unset
        ]
        refuse(path, document, [*document.problems, *found])
        raise
    taken_from: T = _relative(value, path.resolve().parent)
    return taken_from


def refuse(path: Path, document: Document, found: list[Problem]) -> None:
    """Raises ConfigError if anything was found."""
    if found:
        first = document.redacted(one_line(found, document.data))
        every = [document.redacted(line) for line in lines(found, document.data)]
        raise Refused(path, first, every) from None


def _relative(value: Any, directory: Path) -> Any:
    """Returns `value` with each Path in it made relative to `directory`."""
    if isinstance(value, Path):
        return directory / value
    if isinstance(value, Section):
        fields = {
            name: _relative(getattr(value, name), directory) for name in type(value).model_fields
        }
        if isinstance(value, DnsDiscovery):  # whose template is not validated as a backend yet
            fields["backend"] = {
                key: str(directory / text) if key == "tokenizer" and isinstance(text, str) else text
                for key, text in value.backend.items()
            }
        return value.model_copy(update=fields)
    if isinstance(value, tuple):
        return tuple(_relative(item, directory) for item in value)
    if isinstance(value, dict):
        return {key: _relative(item, directory) for key, item in value.items()}
    return value
