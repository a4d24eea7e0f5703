"""OpenAI's error object: one clear line, the offending field, and a code for programs."""

import json
import logging
import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from octet.errors import BackendError, BackendUnavailable, BackendUnproven, OctetError, RequestError
from serve.backends.openai_errors import Refusal
from serve.telemetry.observation import CLIENT_CLOSED_REQUEST

__all__ = [
    "code_of",
    "error_bytes",
    "error_headers",
    "forget_frames",
    "install",
    "sse_error",
    "status_of",
]

_log = logging.getLogger(__name__)


def status_of(error: Exception) -> int:
    """Returns the HTTP status of a request that ends with `error`."""
    if isinstance(error, RequestError):
        return error.status
    if _is_unavailable(error):
        return 503
    return 502 if isinstance(error, BackendError) else 500


def _is_unavailable(error: Exception) -> bool:
    """Returns True if no backend took the request, False if one took it and failed."""
    return isinstance(error, BackendUnavailable) and error.kind not in ("failed", "garbled")


def code_of(error: Exception) -> str:
    """Returns the code of `error` for metrics: one of a few, whatever code a server uses."""
    if isinstance(error, Refusal):
        return "refused_by_backend"
    if isinstance(error, RequestError):
        return error.code or "invalid_request"
    if _is_unavailable(error):
        return "backend_unproven" if isinstance(error, BackendUnproven) else "backend_unavailable"
    return "backend_error" if isinstance(error, BackendError) else "internal_error"


def error_headers(error: Exception) -> dict[str, str]:
    """Returns the content type, and when to retry or how to authenticate."""
    headers = {"content-type": "application/json"}
    status = status_of(error)
    retry_after_s: float | None = getattr(error, "retry_after_s", None)
    if retry_after_s is not None or status == 503:
        headers["retry-after"] = str(max(1, math.ceil(retry_after_s or 0)))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return headers


def error_bytes(error: Exception) -> bytes:
    """Returns the error object as JSON. A defect of the gateway shows no detail but is logged."""
    param: str | None = None
    if isinstance(error, RequestError):
        message, kind, param, code = str(error), error.kind, error.param, error.code
    elif _is_unavailable(error):
        message, kind, code = str(error), "service_unavailable_error", code_of(error)
    elif isinstance(error, BackendError):
        message, kind, code = str(error), "backend_error", "backend_error"
    else:
        message, kind, code = "internal error; see the gateway's log", "internal_error", None
    content = {"message": " ".join(message.split()), "type": kind, "param": param, "code": code}
    return json.dumps({"error": content}).encode()


def forget_frames(error: BaseException) -> None:
    """Removes the tracebacks of a handled error and of those that led to it.

    A traceback holds the frames of the request, and they hold the error: such a cycle would keep
    the bodies in memory until the next garbage collection.
    """
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is not None and one.__traceback__ is not None:
            one.__traceback__ = None
            left += one.__cause__, one.__context__


def sse_error(error: Exception) -> bytes:
    """Returns the error object as a server-sent event, for an answer that has begun."""
    if not isinstance(error, OctetError):
        _log.error("a streamed answer failed", exc_info=error)
    return b"data: " + error_bytes(error) + b"\n\n"


def install(app: FastAPI) -> None:
    """Turns every failure of `app` into an error object, including unknown paths and defects."""

    async def ours(
        request: Request, error: Exception, headers: Mapping[str, str] | None = None
    ) -> Response:
        observation = request.scope.get("octet")  # none on the administration port
        if observation is not None:
            observation.refused(code_of(error))
        headers = error_headers(error) | dict(headers or {})
        return Response(error_bytes(error), status_of(error), headers)

    async def http(request: Request, error: Any) -> Response:
        return await ours(request, _from_http(request, error), error.headers)

    async def gone(_request: Request, _error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    async def unfit(request: Request, error: Any) -> Response:
        first = error.errors()[0]
        param = str(first["loc"][-1])
        return await ours(request, RequestError(f"'{param}': {first['msg']}", param=param))

    app.add_exception_handler(OctetError, ours)
    app.add_exception_handler(RequestValidationError, unfit)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(Exception, ours)


def _from_http(request: Request, error: HTTPException) -> RequestError:
    if error.status_code == 404:
        message, code = f"unknown path {request.url.path}", "not_found"
    elif error.status_code == 405:
        message = f"{request.url.path} does not take {request.method}"
        code = "method_not_allowed"
    else:
        message = str(error.detail) or HTTPStatus(error.status_code).phrase
        code = HTTPStatus(error.status_code).name.lower()
    return RequestError(message, status=error.status_code, code=code)
