"""Reads a YAML file as plain data: refuses repeated keys, fills in environment variables."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import yaml

from octet.errors import ConfigError

__all__ = ["Document", "Loc", "Problem"]

Loc = tuple[str | int, ...]  # keys and indices, from the top of the file
Problem = tuple[Loc, str]  # place, and the problem there

# `$${` is a literal `${`; `${NAME:-text}` is `text` where NAME is not set, or empty.
_VARIABLE = re.compile(r"\$\$\{|\$\{(?:([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\})?")
_SHORTEST_SECRET = 4  # characters; a shorter value is no secret, and may occur in any text


@dataclass
class Document:
    """The data of a file. `problems` lists its variables that are not set."""

    data: Any
    problems: list[Problem] = field(default_factory=list)
    _values: dict[str, str] = field(default_factory=dict, repr=False)  # value: ${NAME}

    @classmethod
    def read(cls, path: Path, environment: Mapping[str, str] = os.environ) -> Self:
        """Reads `path`. Raises ConfigError for a file that is missing, not text or not YAML."""
        try:
            data = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8 text"
            raise ConfigError(f"configuration {path}: {reason}") from None
        except yaml.YAMLError as error:
            raise ConfigError(f"configuration {path}: {_one_line(error)}") from None
        except RecursionError:
            raise ConfigError(f"configuration {path}: nested too deeply") from None
        document = cls(None)
        document.data = document._filled_in(data, (), environment)
        return document

    def redacted(self, line: str) -> str:
        """Returns `line` with the values of variables replaced by their names, as in the file."""
        for value, name in sorted(self._values.items(), key=lambda item: -len(item[0])):
            line = line.replace(value, name)
        return line

    def _filled_in(self, value: Any, loc: Loc, environment: Mapping[str, str]) -> Any:
        if isinstance(value, dict):
            return {k: self._filled_in(v, (*loc, k), environment) for k, v in value.items()}
        if isinstance(value, list):
            return [self._filled_in(v, (*loc, i), environment) for i, v in enumerate(value)]
        if not isinstance(value, str) or "${" not in value:
            return value

        def variable(match: re.Match[str]) -> str:
            name, default = match.groups()
            if match[0] == "$${":
                return "${"
            if name is None:
                self.problems.append((loc, "write a variable as ${NAME} or ${NAME:-default}"))
                return match[0]
            found = environment.get(name)
            if found:
                if len(found) >= _SHORTEST_SECRET:
                    self._values[found] = f"${{{name}}}"
                return found
            if default is None:
                message = f"the environment variable {name} is not set, or empty"
                self.problems.append((loc, message))
            return default or ""

        return _VARIABLE.sub(variable, value)


class _UniqueKeys(yaml.SafeLoader):
    """Makes a repeated key an error; in YAML it silently replaces the first."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Adds line and type to PyYAML's errors that have neither, such as for 2026-02-30."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, TypeError, AttributeError, LookupError):
            line, kind = node.start_mark.line + 1, node.tag.rpartition(":")[2]
            raise yaml.YAMLError(f"line {line}: not a valid {kind}") from None

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Checks the keys as written, because merging (<<) rightly repeats keys later."""
        node = super().compose_mapping_node(anchor)
        seen: set[Any] = set()
        for key in _scalars(node):
            if key.value in seen:
                line = key.start_mark.line + 1
                raise yaml.YAMLError(f"line {line}: the key '{key.value}' is repeated")
            seen.add(key.value)
        return node


def _scalars(node: yaml.MappingNode) -> Iterator[yaml.ScalarNode]:
    return (key for key, _ in node.value if isinstance(key, yaml.ScalarNode))


def _one_line(error: yaml.YAMLError) -> str:
    """Returns line, column and problem, without the file's excerpt, which may hold a secret."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())
    context = getattr(error, "context", None)
    while_what = f" ({context})" if context else ""
    problem = getattr(error, "problem", None)
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}{while_what}"
