"""Decodes a request body as a JSON object: UTF-8, no repeated keys, bounded in every way.

The body is forwarded to a backend byte for byte, so anything that two decoders might read
differently is refused.
"""

from typing import Any

from octet.errors import RequestError
from serve.api.strict_json import loads, loads_large

__all__ = ["LARGE", "decode", "require_json"]

LARGE = 64 * 1024  # bytes; a body up to this size is decoded and checked in under 1 ms
MAX_DEPTH = 256  # nesting levels of arrays and objects


def require_json(content_type: bytes | None) -> None:
    """Raises RequestError if the content type is not JSON; a missing content type passes.

    The status is 400 and not 415, as in vLLM. The check matters because browsers send forms and
    plain text to any site without a preflight request.
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
        # The depth check takes longer the more brackets there are; most bodies have a handful.
        if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
            _require_shallow(data)
        if b"\\ud" in body or b"\\uD" in body:  # most likely an escaped surrogate
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
    """Raises RequestError for a lone surrogate: UTF-8 has none, but an escape can produce one.

    `name` is the name of the field.
    """
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
