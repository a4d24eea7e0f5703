"""The exception tree: a user's mistake says what was wrong, where, and what to do, in one line.

Every `OctetError` ends a command with that line on standard error and its `exit_code`: 2, or 1 of a
gate that was not met. Anything else that escapes is a defect of ours and shows its traceback.
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
    "NeedsTokenizer",
    "NumericsError",
    "OctetError",
    "RequestError",
    "SampleError",
    "UnsupportedError",
    "UnsupportedField",
    "nearest",
]


class OctetError(Exception):
    """A mistake or a condition that the user can act on; `str()` is the one line to show."""

    exit_code = 2


class ConfigError(OctetError):
    """A flag, a recipe or a configuration file that cannot be used as written."""


class CheckpointError(OctetError):
    """A path that is not a checkpoint, or one that is truncated, altered or incomplete."""


class UnsupportedError(OctetError):
    """An architecture, format or combination that is known not to work, named with what does."""


class SampleError(OctetError):
    """Calibration or held-out samples that are missing, malformed or too few."""


class NumericsError(OctetError):
    """NaN or Inf where a finite value is needed, named by layer or tensor."""


class ArtifactError(OctetError):
    """An artifact with an unknown schema version, a missing file or a hash that does not match."""


class ExportError(OctetError):
    """An export that the engine which must run it refuses, or whose numbers are off."""


class GateError(OctetError):
    """A model that costs more than it may: nothing was done wrong, and nothing was written."""

    exit_code = 1


class RequestError(OctetError):
    """A request that cannot be served as sent; becomes OpenAI's error object.

    `status` is the HTTP status (400, 401, 403, 404, 413, 429, 503, 504, ...), `param` the offending
    field, `retry_after_s` when it is worth asking again (`Retry-After`, in whole seconds).
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
#   timeout     a deadline of the gateway's passed
#   overloaded  it is alive and takes no more (its 429 or 503)
#   failed      it said so itself: a 5xx, or an error in the stream
#   garbled     what it sent is not the protocol, or ends too early
#   dead        it said that it can serve nobody ("Stub process ... is not healthy")
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
    """A backend that failed before its first token: another one may be asked."""

    def __init__(
        self,
        message: str,
        *,
        kind: FailureKind = "refused",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, kind=kind, retry_after_s=retry_after_s)


class BackendUnproven(BackendUnavailable):
    """None that can be reached has proven that its numbers are those of what it serves."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` for the closest of `known`, or the full list if none is close."""
    options = sorted(known)
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else f"; known: {', '.join(options)}"


class UnsupportedField(RequestError):
    """A field that one backend cannot honour, though another of its pool may."""


class NeedsTokenizer(UnsupportedField):
    """What a backend of which the gateway has no tokenizer cannot do."""
