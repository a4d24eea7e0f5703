"""Turns pydantic's errors into the gateway's messages: one line each, at the key as in the file."""

from collections.abc import Iterator, Sequence
from typing import Any, get_args, get_origin

from pydantic import ValidationError

from octet.errors import nearest
from serve.config.document import Loc, Problem
from serve.config.section import PATTERNS, Section, tag

__all__ = ["key_path", "lines", "one_line", "problems_of"]

_MESSAGES = {
    "missing": "missing",
    "model_type": "should be a section of keys and values",
    "dict_type": "should be a section of keys and values",
    "tuple_type": "should be a list",
    "list_type": "should be a list",
    "too_short": "needs at least one entry",
}
_ORDER = {"extra_forbidden": 0, "missing": 2}


def problems_of(error: ValidationError, root: type[Section]) -> list[Problem]:
    """Lists the problems of a file whose top level is `root`, or a list of it."""
    found = error.errors(include_url=False, include_input=False)
    # Unknown keys first: a missing key is often there, but misspelled.
    found.sort(key=lambda item: _ORDER.get(item["type"], 1))
    return [(item["loc"], _message(item, root)) for item in found]


def key_path(loc: Loc, data: Any) -> str:
    """Writes `loc` as a path into `data`, without what pydantic adds for unions and for lists."""
    parts = []
    for part in loc:
        named = isinstance(part, str)
        if part == "[key]" or (named and (str(part).startswith("<") or isinstance(data, list))):
            continue
        parts.append(str(part))
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            data = None
    return ".".join(parts) or "top level"


def one_line(problems: Sequence[Problem], data: Any) -> str:
    """Returns the first problem, and the number of further ones."""
    first, *others = lines(problems, data)
    return f"{first} (and {len(others)} more)" if others else first


def lines(problems: Sequence[Problem], data: Any) -> list[str]:
    """Returns one line per problem, with its key."""
    return [f"{key_path(loc, data)}: {message}" for loc, message in problems]


def _message(item: Any, root: type[Section]) -> str:
    kind, loc = item["type"], item["loc"]
    if kind == "extra_forbidden":
        return f"unknown key{nearest(str(loc[-1]), _known_keys(root, loc))}"
    if kind == "string_pattern_mismatch":
        return PATTERNS[item["ctx"]["pattern"]]
    message = str(item["msg"]).removeprefix("Value error, ").replace("Input should", "should")
    return _MESSAGES.get(kind, message)


def _known_keys(root: type[Section], loc: Loc) -> set[str]:
    """Returns the keys of the section that `loc` is in."""
    sections, named = [root], False
    for part in loc[:-1]:
        if named:  # a name that the operator chooses: a model's, or a pool's
            named = False
            continue
        fields = [s.model_fields[part] for s in sections if part in s.model_fields]
        if fields:
            sections = [s for field in fields for s in _sections(field.annotation)]
            named = any(get_origin(field.annotation) is dict for field in fields)
        elif isinstance(part, str) and part.startswith("<"):
            sections = [s for s in _known_sections() if tag(s) == part] or sections
    return {name for section in sections for name in section.model_fields}


def _known_sections(base: type[Section] = Section) -> Iterator[type[Section]]:
    for section in base.__subclasses__():
        yield section
        yield from _known_sections(section)


def _sections(annotation: Any) -> Iterator[type[Section]]:
    """Yields the sections in an annotation, also inside its tuples, dicts and unions."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for argument in get_args(annotation):
        yield from _sections(argument)
