"""Answers of who knows whom: of a backend that became another one while it was asked."""

import logging

from octet.errors import BackendUnavailable
from serve.api.answer import Answer, close
from serve.members.member import Lease

__all__ = ["Disowned", "require_same"]

_log = logging.getLogger(__name__)


class Disowned(BackendUnavailable):
    """No fault of the backend that is there now."""


async def require_same(lease: Lease, answer: Answer) -> None:
    """Raises Disowned, `answer` closed, if the backend is not any more as when `lease` began."""
    outlived = True
    try:
        outlived = await lease.outlived()
    finally:
        if outlived and answer.rest is not None:
            await close(answer.rest)
    if outlived:
        name = lease.member.name
        line = f"{name} was restarted, or found to be wrong, before its answer began"
        _log.warning("pool %s: %s", lease.member.pool, line)
        raise Disowned(line, kind="lost")
