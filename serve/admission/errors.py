"""Refusals of requests for lack of capacity, or because the server is shutting down."""

from octet.errors import RequestError

__all__ = ["Overloaded", "overloaded", "shutting_down"]


class Overloaded(RequestError):
    """A 503 error; `reason` (queue_full, queue_too_long, queue_timeout, memory) is for metrics."""

    reason = ""


def overloaded(message: str, retry_after_s: float, *, reason: str) -> Overloaded:
    error = Overloaded(
        message,
        status=503,
        code="overloaded",
        kind="service_unavailable_error",
        retry_after_s=retry_after_s,
    )
    error.reason = reason
    return error


def shutting_down(retry_after_s: float = 1.0) -> RequestError:
    return RequestError(
        "the server is shutting down",
        status=503,
        code="draining",
        kind="service_unavailable_error",
        retry_after_s=retry_after_s,
    )
