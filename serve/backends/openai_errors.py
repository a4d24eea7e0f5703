"""Translates failures of a server that speaks OpenAI's protocol into the gateway's errors."""

import email.utils
import json
import time
from collections.abc import Mapping
from typing import Any

import aiohttp

from octet.errors import BackendError, BackendUnavailable, FailureKind, RequestError, printable
from serve.backends.connection import reason_of

__all__ = [
    "Refusal",
    "failure",
    "from_event",
    "is_dead",
    "kind_of",
    "lost_while_answering",
    "no_answer",
    "retry_after",
]

LONGEST_S = 86_400.0  # longest Retry-After that is honoured; a long number parses as infinity

# vLLM's EngineDeadError and its predecessors, by the type's name or by its text.
_DEAD = (
    "EngineDeadError",
    "EngineCore encountered an issue",
    "Background loop has errored",
    "Background loop is stopped",
    "cannot schedule new futures after",  # Python's, from a vLLM that is stopping and drains
    "is not healthy",
)
# Statuses by an error's type, for events without one: Anthropic's, and some of OpenAI's.
_STATUSES = {"invalid_request_error": 400, "rate_limit_error": 429, "overloaded_error": 503}


class Refusal(RequestError):
    """A server's refusal of a request, with the server's own message; `code` may be anything."""


def failure(
    name: str, status: int, headers: Mapping[str, str], body: bytes
) -> BackendUnavailable | RequestError:
    """Returns the error for a response that is not a 200; the beginning of `body` is enough.

    429 and 503 are `overloaded`. Other 5xx, and a refusal of the gateway's own key, are `failed`.
    Other 4xx, and 501, are the client's mistake: a RequestError with the server's status, field and
    code.
    """
    message, param, code = _parsed(body)
    kind = kind_of(status, body)
    if kind is None:
        message = message or f"the backend answered {status}"
        return Refusal(message, status=status, param=param, code=code)
    if status < 400:  # a redirect's page contains an address that clients must not see
        message = f"answered {status}, which is not followed"
    line = f"{name}: {message or f'answered {status}'}"
    if status in (401, 403, 407):
        line += " (it refuses the gateway's key)"
    after = retry_after(headers.get("retry-after")) if kind == "overloaded" else None
    return BackendUnavailable(line, kind=kind, retry_after_s=after)


def kind_of(status: int, body: bytes) -> FailureKind | None:
    """Returns the kind of failure that a non-200 response shows; None if it is the client's."""
    if status >= 500 and is_dead(_parsed(body)[0]):
        return "dead"
    if status in (429, 503):
        return "overloaded"
    if status == 501:  # the server works, but does not implement this
        return None
    if status >= 500 or status in (401, 403, 407):
        return "failed"
    return None if status >= 400 else "garbled"


def from_event(name: str, error: Any) -> BackendError | RequestError:
    """Returns the error for a stream event that has an `error` member."""
    body = json.dumps({"error": error}).encode()
    message, param, code = _parsed(body)
    line = f"{name}: {message or 'failed while answering'}"
    status = error.get("code") if isinstance(error, dict) else None
    if not isinstance(status, int) and isinstance(error, dict):
        status = _STATUSES.get(str(error.get("type")))
    # Check the status before the message, which may quote the client.
    if isinstance(status, int) and 400 <= status < 500 and status != 429:
        return Refusal(message, status=status, param=param, code=code)
    if is_dead(message):
        return BackendError(line, kind="dead")
    return BackendError(line, kind="overloaded" if status in (429, 503) else "failed")


def is_dead(message: str) -> bool:
    """Decides whether a server's message reports that it will serve no more requests."""
    return any(sign in message for sign in _DEAD)


def no_answer(name: str, error: Exception) -> BackendUnavailable:
    """Returns the error for a request that was not answered, not even with a status line."""
    kind: FailureKind = "lost"
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        kind = "refused"
    elif isinstance(error, aiohttp.ClientResponseError | aiohttp.ClientPayloadError):
        kind = "garbled"
    elif isinstance(error, aiohttp.InvalidURL | aiohttp.ClientSSLError):
        kind = "refused"
    words = {"refused": "cannot be reached", "garbled": "answered with something that is not HTTP"}
    line = f"{name}: {words.get(kind, 'closed the connection')} ({_reason(error)})"
    return BackendUnavailable(line, kind=kind)


def lost_while_answering(name: str, error: Exception) -> BackendError:
    """Returns the error for a body that broke off, or became unreadable, before its end."""
    return BackendError(f"{name}: failed while answering ({_reason(error)})", kind="lost")


def retry_after(value: str | None) -> float | None:
    """Returns seconds, from a header of seconds or a date, a day at most; None for neither."""
    if value is None:
        return None
    try:
        seconds = float(value) if value.strip().isdigit() else _until(value)
        return min(max(0.0, seconds), LONGEST_S)
    except (TypeError, ValueError, OverflowError):
        return None


def _until(date: str) -> float:
    return email.utils.parsedate_to_datetime(date).timestamp() - time.time()


def _parsed(body: bytes) -> tuple[str, str | None, str | None]:
    """Returns message, field and code of an error object, in any server's format."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        beginning = body[:200].decode(errors="replace")
        return printable(" ".join(beginning.split())), None, None
    # vLLM, SGLang: {"error": {...}}; older ones without this wrapper; FastAPI: {"detail": ...}
    error = data.get("error", data) if isinstance(data, dict) else data
    if not isinstance(error, dict):
        return printable(str(error)[:500]), None, None
    message = error.get("message") or error.get("detail") or ""
    code, param = error.get("code"), error.get("param")
    named = isinstance(code, str) and not code.isdigit()  # a number is the status again
    message = printable(" ".join(str(message)[:2000].split()))
    return message, param if isinstance(param, str) else None, code if named else None


def _reason(error: Exception) -> str:
    """Describes `error` in a few words. aiohttp's own repeat the address, which stays private."""
    if isinstance(error, aiohttp.ClientResponseError):
        return error.message.partition("\n")[0].rstrip(" :")  # the rest quotes what it sent
    if isinstance(error, aiohttp.ClientConnectorError):
        return reason_of(error.os_error)
    if isinstance(error, OSError):  # TimeoutError is one
        return reason_of(error)
    if type(error) is aiohttp.ClientConnectionError:  # our own: see OpenAiHttpBackend.close
        return str(error)
    known = (kind for kind in _WORDS if isinstance(error, kind))
    return _WORDS.get(next(known, type(error)), "the connection failed")


_WORDS: dict[type[Exception], str] = {
    aiohttp.ClientPayloadError: "it closed the connection",
    aiohttp.ServerDisconnectedError: "no answer came",
    aiohttp.InvalidURL: "its URL is not one",
}
