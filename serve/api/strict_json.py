"""Decodes JSON without repeated keys, NaN and infinity; large texts do not block the event loop.

The C decoder holds the interpreter's lock from its first byte to its last: 0.1 s for three million
token ids. `loads_large` runs on a thread. It walks containers in Python and decodes numbers some
thousands at a time, and the event loop runs in between.
"""

import json
import math
import re
from typing import Any

from octet.errors import RequestError

__all__ = ["loads", "loads_large"]

# Does not count numbers in arrays. Freeing millions of objects would hold the lock too.
MAX_VALUES = 2**18
_RUN = 32 * 1024  # characters of an array of numbers, decoded at once
_DIGITS = frozenset("-0123456789")
_SPACE = re.compile(r"[ \t\n\r]*")


def loads(text: str) -> Any:
    """Decodes `text`. Raises ValueError, or RecursionError if it is nested too deeply."""
    return _decoder.decode(text)


def loads_large(text: str) -> Any:
    """Does the same as `loads`. Raises RequestError (413) for more than `MAX_VALUES` values."""
    return _Large(text).decode()


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Builds a dict from `pairs`. Raises ValueError for a repeated key.

    The backend gets the same bytes, and might resolve the repetition differently.
    """
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key '{key[:40]}' is repeated")
            seen.add(key)
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _finite(digits: str) -> float:
    """Decodes a number. Raises ValueError for one that would become `Infinity` when written."""
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"the number {digits[:40]} is too large")
    return value


_decoder = json.JSONDecoder(
    object_pairs_hook=_without_repeats, parse_constant=_no_constant, parse_float=_finite
)


class _Large:
    """A decoder that lets other threads run."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.values = 0

    def decode(self) -> Any:
        value, end = self._value(self._skip(0))
        if end != len(self.text):
            raise self._expected("the end", end)
        return value

    def _value(self, at: int) -> tuple[Any, int]:
        """Returns the value that begins at `at`, and the offset after it and its spaces."""
        self.values += 1
        if self.values > MAX_VALUES:
            raise RequestError(
                f"the body has more than {MAX_VALUES} values", status=413, code="request_too_large"
            )
        value: Any
        opening = self.text[at : at + 1]
        if opening == "[":
            value, end = self._array(at + 1)
        elif opening == "{":
            value, end = self._object(at + 1)
        else:
            value, end = _decoder.raw_decode(self.text, at)
        return value, self._skip(end)

    def _array(self, at: int) -> tuple[list[Any], int]:
        values: list[Any] = []
        at = self._skip(at)
        if self.text.startswith("]", at):
            return values, at + 1
        while True:
            at = self._numbers(values, at)
            value, at = self._value(at)
            values.append(value)
            if self.text.startswith("]", at):
                return values, at + 1
            at = self._comma(at)

    def _numbers(self, values: list[Any], at: int) -> int:
        """Appends the numbers from `at` on, except the last; returns the next value's offset."""
        while self.text[at : at + 1] in _DIGITS:
            run = self.text[at : at + _RUN]
            for other in '[]{}"':
                run = run.partition(other)[0]
            last = run.rfind(",")
            if last < 0:
                break
            try:
                values += loads(f"[{run[:last]}]")
            except ValueError as error:
                raise ValueError(f"after character {at}: {error}") from None
            at = self._skip(at + last + 1)
        return at

    def _object(self, at: int) -> tuple[dict[str, Any], int]:
        pairs: list[tuple[str, Any]] = []
        at = self._skip(at)
        if self.text.startswith("}", at):
            return {}, at + 1
        while True:
            if not self.text.startswith('"', at):
                raise self._expected("a key", at)
            key, at = _decoder.raw_decode(self.text, at)
            at = self._skip(at)
            if not self.text.startswith(":", at):
                raise self._expected("':'", at)
            value, at = self._value(self._skip(at + 1))
            pairs.append((key, value))
            if self.text.startswith("}", at):
                return _without_repeats(pairs), at + 1
            at = self._comma(at)

    def _skip(self, at: int) -> int:
        """Returns where the spaces that begin at `at` end."""
        match = _SPACE.match(self.text, at)
        assert match is not None
        return match.end()

    def _comma(self, at: int) -> int:
        if not self.text.startswith(",", at):
            raise self._expected("',' or the end of the array or object", at)
        return self._skip(at + 1)

    def _expected(self, what: str, at: int) -> ValueError:
        return ValueError(f"expected {what} at character {at}")
