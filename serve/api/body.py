"""The bytes of a request body as a JSON object: UTF-8, no repeated keys, bounded in every way.

What arrives in a body goes to a backend byte for byte, so whatever two decoders might read in two
ways is refused.
"""

from typing import Any

from octet.errors import RequestError
from serve.api.strict_json import loads, loads_large

__all__ = ["LARGE", "decode", "require_json"]

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
