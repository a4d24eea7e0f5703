"""Error objects: one clear line, the offending field, and a code for programs.

They have OpenAI's form, except on the paths of Anthropic's Messages (`errors_of`).
"""

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
    "OpenAIErrors",
    "code_of",
    "error_bytes",
    "error_headers",
    "errors_of",
    "forget_frames",
    "install",
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
    """Returns the code of `error` for metrics: one of a small set, whatever code a server sent."""
    if isinstance(error, Refusal):
        return "refused_by_backend"
    if isinstance(error, RequestError):
        return error.code or "invalid_request"
    if _is_unavailable(error):
        return "backend_unproven" if isinstance(error, BackendUnproven) else "backend_unavailable"
    return "backend_error" if isinstance(error, BackendError) else "internal_error"


def error_headers(error: Exception) -> dict[str, str]:
    """Returns content-type and, where they apply, retry-after and www-authenticate."""
    headers = {"content-type": "application/json"}
    status = status_of(error)
    retry_after_s: float | None = getattr(error, "retry_after_s", None)
    if retry_after_s is not None or status == 503:
        headers["retry-after"] = str(max(1, math.ceil(retry_after_s or 0)))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return headers


def error_bytes(error: Exception) -> bytes:
    """Returns OpenAI's error object as JSON."""
    return json.dumps({"error": _content(error)}).encode()


def _content(error: Exception) -> dict[str, Any]:
    """Returns the content of OpenAI's error object; no details of a defect in the gateway."""
    param: str | None = None
    if isinstance(error, RequestError):
        message, kind, param, code = str(error), error.kind, error.param, error.code
    elif _is_unavailable(error):
        message, kind, code = str(error), "service_unavailable_error", code_of(error)
    elif isinstance(error, BackendError):
        message, kind, code = str(error), "backend_error", "backend_error"
    else:
        message, kind, code = "internal error; see the gateway's log", "internal_error", None
    return {"message": " ".join(message.split()), "type": kind, "param": param, "code": code}


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


class OpenAIErrors:
    """Writes the errors of completions, chats and embeddings, and of all other paths."""

    takes_x_api_key = False  # as an alternative to `Authorization`

    def refusal(self, body: bytes, status: int) -> bytes:
        """Returns the body of an error answer in the form of this path.

        `body` is an error object in OpenAI's form, of the gateway or of a backend.
        """
        return body

    def event(self, error: Exception, before: int) -> bytes:
        """Returns the error event that ends a stream after `before` events.

        Logs the traceback if the error is a defect in the gateway.
        """
        if not isinstance(error, OctetError):
            _log.error("a streamed answer failed", exc_info=error)
        return self._event(_content(error), status_of(error), before)

    def _event(self, content: dict[str, Any], status: int, before: int) -> bytes:
        return b"data: " + json.dumps({"error": content}).encode() + b"\n\n"


class _ResponsesErrors(OpenAIErrors):
    """Writes the errors of /v1/responses, whose events have names and numbers."""

    def _event(self, content: dict[str, Any], status: int, before: int) -> bytes:
        event = content | {"type": "error", "sequence_number": before}
        return b"event: error\ndata: " + json.dumps(event).encode() + b"\n\n"


class _AnthropicErrors(OpenAIErrors):
    """Writes Anthropic's error objects, whose type follows from the status."""

    takes_x_api_key = True

    def refusal(self, body: bytes, status: int) -> bytes:
        try:
            message = json.loads(body)["error"]["message"]
        except (ValueError, LookupError, TypeError, RecursionError):
            message = f"the backend answered {status}"
        return json.dumps(_anthropic(str(message), status)).encode()

    def _event(self, content: dict[str, Any], status: int, before: int) -> bytes:
        event = json.dumps(_anthropic(content["message"], status)).encode()
        return b"event: error\ndata: " + event + b"\n\n"


# Anthropic's types of errors. Of other statuses, 4xx are `invalid_request_error`, 5xx `api_error`.
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def _anthropic(message: str, status: int) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


_OPENAI = OpenAIErrors()
_ERRORS: dict[str, OpenAIErrors] = {
    "/v1/responses": _ResponsesErrors(),
    "/v1/messages": _AnthropicErrors(),
    "/v1/messages/count_tokens": _AnthropicErrors(),
}


def errors_of(path: str) -> OpenAIErrors:
    """Returns how errors of this path are written."""
    return _ERRORS.get(path, _OPENAI)


def install(app: FastAPI) -> None:
    """Turns every failure of `app` into an error object, including unknown paths and defects."""

    async def answer(
        request: Request, error: Exception, headers: Mapping[str, str] | None = None
    ) -> Response:
        observation = request.scope.get("octet")  # none on the administration port
        if observation is not None:
            observation.refused(code_of(error))
        headers = error_headers(error) | dict(headers or {})
        status = status_of(error)
        body = errors_of(request.url.path).refusal(error_bytes(error), status)
        return Response(body, status, headers)

    async def framework_error(request: Request, error: Any) -> Response:
        return await answer(request, _from_http(request, error), error.headers)

    async def client_gone(_request: Request, _error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    async def invalid_parameter(request: Request, error: Any) -> Response:
        first = error.errors()[0]
        param = str(first["loc"][-1])
        return await answer(request, RequestError(f"'{param}': {first['msg']}", param=param))

    app.add_exception_handler(OctetError, answer)
    app.add_exception_handler(RequestValidationError, invalid_parameter)
    app.add_exception_handler(HTTPException, framework_error)
    app.add_exception_handler(ClientDisconnect, client_gone)
    app.add_exception_handler(Exception, answer)


def _from_http(request: Request, error: HTTPException) -> RequestError:
    """Returns an error of the web framework, such as for an unknown path, as a RequestError."""
    if error.status_code == 404:
        message, code = f"unknown path {request.url.path}", "not_found"
        if request.url.path.startswith("/v1/responses/"):
            message += "; no response is stored here: send the whole conversation in 'input'"
    elif error.status_code == 405:
        message = f"{request.url.path} does not take {request.method}"
        code = "method_not_allowed"
    else:
        message = str(error.detail) or HTTPStatus(error.status_code).phrase
        code = HTTPStatus(error.status_code).name.lower()
    return RequestError(message, status=error.status_code, code=code)
