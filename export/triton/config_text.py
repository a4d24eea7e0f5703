"""Writes a dataclass in protobuf's text format: `pbtxt(config)` is a config.pbtxt."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

__all__ = ["pbtxt"]

WIDTH = 100


def pbtxt(message: Any) -> str:
    return "".join(f"{line}\n" for line in _message(message))


def _message(message: Any) -> Iterator[str]:
    """Yields the fields' lines; leaves out absent, false and empty values, protobuf's defaults."""
    for field in dataclasses.fields(message):
        value = getattr(message, field.name)
        if value is None or value is False or value in ("", (), {}):
            continue
        if isinstance(value, Mapping):
            for key, item in value.items():
                yield from _block(field.name, [f"key: {_scalar(key)}", *_field("value", item)])
        elif isinstance(value, tuple) and dataclasses.is_dataclass(value[0]):
            for item in value:
                yield from _field(field.name, item)
        else:
            yield from _field(field.name, value)


def _field(name: str, value: Any) -> Iterator[str]:
    if dataclasses.is_dataclass(value):
        return _block(name, list(_message(value)))
    return iter([f"{name}: {_scalar(value)}"])


def _block(name: str, lines: Sequence[str]) -> Iterator[str]:
    """Yields a message, on one line if it fits."""
    inline = " ".join([name, "{", *lines, "}"])
    if len(inline) <= WIDTH:
        yield inline
        return
    yield f"{name} {{"
    for line in lines:
        yield f"  {line}"
    yield "}"


def _scalar(value: Any) -> str:
    match value:
        case Enum():
            return str(value.value)
        case bool():
            return "true" if value else "false"
        case str():
            return json.dumps(value, ensure_ascii=False)  # protobuf has all of JSON's escapes
        case tuple():
            return f"[ {', '.join(map(_scalar, value))} ]"
        case _:
            return str(value)
