"""The exception tree: each error says what was wrong, where, and what to do, in one line.

An `OctetError` ends a command with that line on standard error and its `exit_code`: 2, or 1 for a
failed accuracy gate. Any other exception that escapes is a defect in Octet and shows its traceback.
"""

import difflib
from collections.abc import Iterable
from typing import Literal, TypeAlias

__all__ = [
    "ArtifactError",
    "BackendError",
    "BackendUnavailable",
    "BackendUnproven",
    "CheckpointError",
    "ConfigError",
    "ExportError",
    "FailureKind",
    "GateError",
    "GpuError",
    "NeedsTokenizer",
    "NumericsError",
    "OctetError",
    "RequestError",
    "SampleError",
    "UnsupportedError",
    "UnsupportedField",
    "nearest",
    "printable",
]


_LONGEST = 4000  # characters of a line


class OctetError(Exception):
    """A mistake or a condition that the user can act on; `str()` is the one line to show."""

    exit_code = 2
    printed_elsewhere = False  # True on the other ranks, if rank 0 of a calibration prints it

    def __str__(self) -> str:
        """Returns the line; control characters, which a file may hold, become escapes in it."""
        text = super().__str__()
        line = text if text.isprintable() else "".join(map(_printable, text))
        return line if len(line) <= _LONGEST else f"{line[: _LONGEST // 2]} ... {line[-300:]}"


class ConfigError(OctetError):
    """A flag, a recipe or a configuration file that cannot be used as written."""


class CheckpointError(OctetError):
    """A path that is not a checkpoint, or one that is truncated, altered or incomplete."""


class UnsupportedError(OctetError):
    """An unsupported architecture, format or combination; the message names what is supported."""


class SampleError(OctetError):
    """Calibration or held-out samples that are missing, malformed or too few."""


class NumericsError(OctetError):
    """NaN or Inf where a finite value is needed; the message names the layer or tensor."""


class ArtifactError(OctetError):
    """An artifact with an unknown schema version, a missing file or a hash that does not match."""


class ExportError(OctetError):
    """An export that its target engine refuses, or whose logits are wrong."""


class GpuError(OctetError):
    """A GPU or its driver that failed while it computed."""


class GateError(OctetError):
    """A model that fails its accuracy gate, or a server its proof: no mistake of the user.

    Nothing was written, or measured.
    """

    exit_code = 1


class RequestError(OctetError):
    """A request that cannot be served as sent; becomes OpenAI's error object.

    `status` is the HTTP status (400, 401, 403, 404, 413, 429, 503, 504, ...), `param` the offending
    field, `retry_after_s` the delay before a retry is worthwhile (`Retry-After`, in whole seconds).
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.kind = kind
        self.retry_after_s = retry_after_s


# How a backend failed a request:
#   refused     no connection could be made: nothing was sent
#   lost        the connection ended before the answer did
#   timeout     a deadline of the gateway passed
#   overloaded  the backend is alive and has no capacity (its 429 or 503)
#   failed      the backend reported an error: a 5xx, or an error in the stream
#   garbled     the response violates the protocol, or ends too early
#   dead        the backend reported that it cannot serve ("Stub process ... is not healthy")
FailureKind: TypeAlias = Literal[
    "refused", "lost", "timeout", "overloaded", "failed", "garbled", "dead"
]


class BackendError(OctetError):
    """A backend that failed while serving a request."""

    def __init__(
        self,
        message: str,
        *,
        kind: FailureKind = "failed",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry_after_s = retry_after_s


class BackendUnavailable(BackendError):
    """A backend that failed before its first token: the request may go to another one."""

    def __init__(
        self,
        message: str,
        *,
        kind: FailureKind = "refused",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, kind=kind, retry_after_s=retry_after_s)


class BackendUnproven(BackendUnavailable):
    """No reachable backend has proven that it matches its declared configuration."""


def _printable(character: str) -> str:
    if character.isprintable() or character.isspace():
        return " " if character in "\r\n\v\f\x1c\x1d\x1e\x85\u2028\u2029" else character
    return character.encode("unicode_escape").decode()


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns `"; did you mean 'x'?"` for the closest of `known`, or the full list if none is."""
    options = sorted(known)
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else f"; known: {', '.join(options)}"


def printable(text: str) -> str:
    """Escapes what would end the line or control the terminal: a server's message may be anything.

    The result has one line.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class UnsupportedField(RequestError):
    """A field that this backend cannot honour, though another of its pool may."""


class NeedsTokenizer(UnsupportedField):
    """A request that needs a tokenizer, for a backend without one in the gateway."""
