"""JSON without repeated keys and without NaN; large texts are decoded with the lock let go.

The C decoder holds the interpreter's lock from its first byte to its last, 0.1 s for three million
token ids. For `loads_large` on a thread, containers are walked in Python, and numbers are decoded
some thousands at a time: in between, the event loop runs.

The bytes of a request body as a JSON object: UTF-8, no repeated keys, bounded in every way.

What arrives in a body goes to a backend byte for byte, so whatever two decoders might read in two
ways is refused.

What comes from the client: its body, within a limit, and that it goes away.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from octet.errors import RequestError

__all__ = ["LARGE", "decode", "disconnected", "loads", "loads_large", "read_body", "require_json"]

# Numbers in arrays not counted. Freeing millions of objects would hold the lock too.
MAX_VALUES = 2**18
_RUN = 32 * 1024  # characters of an array of numbers, decoded at once
_DIGITS = frozenset("-0123456789")
_SPACE = re.compile(r"[ \t\n\r]*")


def loads(text: str) -> Any:
    """Raises ValueError; RecursionError for what is nested too deeply."""
    return _decoder.decode(text)


def loads_large(text: str) -> Any:
    """As `loads`. Raises RequestError (413) for more than `MAX_VALUES` values."""
    return _Large(text).decode()


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A repeated key would be read one way here and another by the backend that gets the bytes."""
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


_decoder = json.JSONDecoder(object_pairs_hook=_without_repeats, parse_constant=_no_constant)


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
        """The value that begins at `at`, and where the next thing after it and its spaces is."""
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
        """Appends the numbers from `at` on, all but the last; returns where the next value is."""
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
        """Where the spaces that begin at `at` end."""
        match = _SPACE.match(self.text, at)
        assert match is not None
        return match.end()

    def _comma(self, at: int) -> int:
        if not self.text.startswith(",", at):
            raise self._expected("',' or the end of the array or object", at)
        return self._skip(at + 1)

    def _expected(self, what: str, at: int) -> ValueError:
        return ValueError(f"expected {what} at character {at}")


LARGE = 64 * 1024  # bytes: decoded and checked in less than a millisecond


MAX_DEPTH = 256  # arrays and objects in each other


def require_json(content_type: bytes | None) -> None:
    """Raises RequestError for a body that says to be something else; one that says nothing passes.

    400 and not 415, as vLLM answers. Browsers send forms and plain text to anyone without asking.
    """
    if content_type is None:
        return
    media_type = content_type.partition(b";")[0].strip().lower()
    if media_type != b"application/json":
        raise RequestError(
            "the body should be JSON: send the header Content-Type: application/json",
            code="unsupported_media_type",
        )


def decode(body: bytes) -> dict[str, Any]:
    """Raises RequestError (400) for anything but one JSON object."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the body is not UTF-8: byte 0x{body[error.start]:02x} at offset {error.start}",
            code="invalid_utf8",
        ) from None
    try:
        data = loads(text) if len(body) <= LARGE else loads_large(text)
        if not isinstance(data, dict):
            raise RequestError("the body should be a JSON object")
        # The more brackets, the longer the look at them; most bodies have a handful.
        if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
            _require_shallow(data)
        if b"\\ud" in body or b"\\uD" in body:  # half of a pair, most likely
            for name, value in data.items():
                _require_unicode(name, name, value)
    except RecursionError:
        raise RequestError("the body is not usable JSON: nested too deeply") from None
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    return data


def _require_shallow(data: dict[str, Any]) -> None:
    level: list[Any] = [data]
    for _ in range(MAX_DEPTH):
        inner = [item for outer in level for item in _items(outer)]
        level = [item for item in inner if isinstance(item, dict | list)]
        if not level:
            return
    raise RecursionError


def _require_unicode(name: str, *values: Any) -> None:
    """UTF-8 has no surrogates, but an escape can bring half a pair. `name` is of the field."""
    for value in values:
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError:
                raise _no_unicode(name) from None
        elif isinstance(value, dict):
            _require_unicode(name, *value, *value.values())
        elif isinstance(value, list):
            _require_unicode(name, *value)


def _no_unicode(name: str) -> RequestError:
    param = name[:100].encode(errors="replace").decode()
    message = f"'{param}': holds a lone surrogate, which is no Unicode text"
    return RequestError(message, param=param, code="invalid_unicode")


def _items(container: Any) -> Any:
    return container.values() if isinstance(container, dict) else container


async def read_body(receive: Receive, headers: Mapping[bytes, bytes], limit: int) -> bytes:
    """The whole body. Raises RequestError (413) if it is larger than `limit` bytes.

    A Content-Length above the limit is refused before anything is read; a chunked body, which has
    none, as soon as it has grown past it. Raises ClientDisconnect if the client goes meanwhile.
    """
    declared = headers.get(b"content-length", b"")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    pieces: list[bytes] = []
    received = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        pieces.append(piece := message.get("body", b""))
        received += len(piece)
        if received > limit:
            raise _too_large(limit)
        if not message.get("more_body"):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


async def disconnected(receive: Receive) -> None:
    """Returns when the client has gone, or has its whole answer; after the body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _too_large(limit: int) -> RequestError:
    message = f"the body is larger than the limit of {limit} bytes"
    return RequestError(message, status=413, code="request_too_large")
