"""A request's body as the backend gets it: the client's bytes, with a member changed in place.

A large body is not written anew, and whatever the client wrote in its own way stays as it was.
Where the bytes leave a doubt, they are written anew from what was decoded.
"""

import json
import re
from typing import Any

__all__ = ["outgoing"]

_ESCAPED_LETTER = re.compile(rb"\\u00(?:6[4-5cCdDfF])")  # one of d, e, l, m, o
_MODEL = re.compile(rb'"model"\s*:\s*"(?:[^"\\]|\\.)*"', re.DOTALL)


def outgoing(raw: bytes, data: dict[str, Any], model: str, *, counted: bool) -> bytes:
    """`raw`, whose decoded form is `data`, asking for `model`; `counted`: and for its usage."""
    changes: dict[str, Any] = {}
    if data.get("model", model) != model:
        changes["model"] = model
        renamed = _with_model(raw, model)
    else:
        renamed = raw
    if counted:
        options = dict(data.get("stream_options") or {})
        # Means something with include_usage only: the client did not ask for what it would bring.
        options.pop("continuous_usage_stats", None)
        changes["stream_options"] = options | {"include_usage": True}
        if renamed is not None:
            renamed = None if "stream_options" in data else _with_usage(renamed)
    if renamed is None:
        return json.dumps(data | changes, separators=(",", ":")).encode()
    return renamed


def _with_model(raw: bytes, model: str) -> bytes | None:
    """None if the member cannot be found for certain.

    Objects inside of others may have a `model` too, and a key may be written with escapes. Without
    an escape of one of its letters, the one and only `"model"` is the one that was decoded.
    """
    if raw.count(b'"model"') != 1 or _ESCAPED_LETTER.search(raw):
        return None
    found = _MODEL.search(raw)
    if found is None:
        return None
    return raw[: found.start()] + b'"model":' + json.dumps(model).encode() + raw[found.end() :]


def _with_usage(raw: bytes) -> bytes:
    at = raw.index(b"{") + 1  # an object, and not an empty one: it has a model
    return raw[:at] + b'"stream_options":{"include_usage":true},' + raw[at:]
