"""Errors that clients get for failing backends: they name members, never addresses.

Also discards an answer from a backend that restarted mid-request (`require_same`).
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence

from octet.errors import (
    BackendError,
    BackendUnavailable,
    BackendUnproven,
    NeedsTokenizer,
    OctetError,
    RequestError,
    UnsupportedField,
)
from serve.api.answer import Answer, close
from serve.api.relay import AnsweredFailure
from serve.api.request.deadlines import Deadlines
from serve.members.member import Lease, Member
from serve.routing.pool import Pool

__all__ = ["Disowned", "fault_of", "nobody_left", "require_same", "too_late", "without_address"]


def fault_of(
    failure: BackendError | asyncio.CancelledError,
    deadlines: Deadlines,
    member: Member,
    first_token_s: float,
) -> BackendError:
    """Returns the backend's fault: `failure` itself, a late first token, or that it went away.

    Raises CancelledError if the request was to end. A backend's clean-up may turn a cancellation
    into any other exception.
    """
    if isinstance(failure, BackendError) and not deadlines.interrupting:
        return failure
    given_up, deadlines.given_up = deadlines.given_up, False
    late = deadlines.expired == "first_token" or (given_up and deadlines.expired is None)
    if deadlines.gone or not (late and deadlines.caught()):
        raise asyncio.CancelledError from failure
    if given_up:
        return BackendUnavailable(f"{member.name} went away, and sent no token", kind="lost")
    return BackendUnavailable(
        f"{member.name} sent no token within {first_token_s:g} s", kind="timeout"
    )


def too_late(
    what: str, queued_s: float, waits: Sequence[tuple[str, float]], tokens: int
) -> RequestError:
    """Returns a 504 error that lists where the time went.

    `waits` holds members' names and when each was sent the request, by `time.monotonic`. `tokens`
    were sent to the client until now.
    """
    spent = [f"{queued_s:.2f} s queued"]
    ends = [*(asked for _, asked in waits), time.monotonic()]
    for (name, asked), end in zip(waits, ends[1:], strict=True):
        spent.append(f"{end - asked:.2f} s waiting for {name}")
    sent = f"{tokens} tokens" if tokens else "nothing"
    return RequestError(
        f"{what}: {', '.join(spent)}; {sent} had been sent",
        status=504,
        code="deadline_exceeded",
        kind="timeout_error",
    )


def nobody_left(pool: Pool, refusal: UnsupportedField | None, unfit: list[Member]) -> OctetError:
    """Returns the error for a request that has no backend left to try.

    That is `refusal` if the members in `unfit` do not support the request. But if the members that
    do support it are only out or full, it is BackendUnavailable: after a refusal, a client would
    never retry.
    """
    spells = isinstance(refusal, NeedsTokenizer)
    able = [
        member
        for member in pool.members
        if member.backend.accepts_extra or (spells and member.backend.tokenizer is not None)
    ]
    if refusal is None:
        return _unavailable(pool, pool.members)
    if able and not any(member in able for member in unfit):
        return _unavailable(pool, able)
    return refusal


def _unavailable(pool: Pool, members: Sequence[Member]) -> BackendUnavailable:
    """Returns the error that no member is available: for lack of proof, if all in reach lack it."""
    standings = Counter(member.standing for member in members)
    counts = [f"{standings[name]} {name}" for name in ("refused", "unproven") if standings[name]]
    said, retry_after_s = f"no backend of the pool '{pool.name}'", pool.retry_after_s(members)
    if counts and standings.keys() <= {"refused", "unproven", "unreachable", "not_ready"}:
        said += f" has proven that its numbers are right ({', '.join(counts)})"
        return BackendUnproven(said, retry_after_s=retry_after_s)
    able = "" if len(members) == len(pool.members) else " that can take this request"
    return BackendUnavailable(f"{said}{able} is available now", retry_after_s=retry_after_s)


def without_address(error: OctetError, member: Member) -> OctetError:
    """Replaces the member's addresses in `error` by its name: clients must not see addresses."""
    answer = error.answer if isinstance(error, AnsweredFailure) else None
    if answer is not None:
        for shown in member.addresses:
            answer.first = answer.first.replace(shown.encode(), member.name.encode())
    text = member.nameless(str(error))
    if text != str(error):
        error.args = (text,)
    return error


_log = logging.getLogger(__name__)


class Disowned(BackendUnavailable):
    """Discards an answer, without blaming the current incarnation of the backend."""


async def require_same(lease: Lease, answer: Answer) -> None:
    """Raises Disowned if the backend restarted, or lost its proof, since `lease` began.

    Closes `answer` before it raises.
    """
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
