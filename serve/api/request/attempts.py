"""Tries one request on the backends that may answer it, until one does.

Nothing has reached the client yet, so another backend may be tried, then another pool:

- A refused connection put no load on a backend. Such attempts never count as retries.
- A lost connection, or a model whose process died, allows one retry outside the retry budget,
  because all requests of that backend fail together, more than a budget would let through.
- Any other failure may be caused by load or by the request, and is retried as far as the pool's
  retry budget allows.

Clients get errors that name members, never addresses.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from octet.errors import (
    BackendError,
    BackendUnavailable,
    BackendUnproven,
    NeedsTokenizer,
    OctetError,
    RequestError,
    UnsupportedField,
)
from serve.access.keys import Principal
from serve.admission.admission import Admission, Ticket
from serve.api.errors import forget_frames
from serve.api.operation import Answer, Call, Operation, close
from serve.api.relay import AnsweredFailure
from serve.api.request.deadlines import Deadlines
from serve.gateway.state import shutting_down
from serve.members.member import Lease, Member
from serve.routing.policies import ask_for
from serve.routing.pool import Pool
from serve.routing.retry_budget import RetryBudget
from serve.routing.tiers import ModelTier
from serve.telemetry.observation import Observation

__all__ = ["Attempts"]

_RETRIED_ON_SAME = ("lost", "failed", "garbled")  # if there is no other member
# Failures that are no sign of load: a request is sent again once, outside the retry budget.
_RETRIED_FREE = ("refused", "lost", "dead")
_log = logging.getLogger(__name__)


class _Restarted(BackendUnavailable):
    """Raised to discard an answer of a backend that has restarted since it was sent the request.

    The failure is not recorded: it would count against the new process.
    """


@dataclass(eq=False)
class Attempts:
    """The attempts of one request: what it holds until `release`, and the retries it has used.

    `pools` are tried in order, as far as `tier` allows them; `headers` are the client's.
    """

    operation: Operation
    call: Call
    pools: Sequence[Pool]
    principal: Principal
    admission: Admission
    observation: Observation
    deadlines: Deadlines
    headers: Mapping[bytes, bytes]
    tier: ModelTier | None = None

    def __post_init__(self) -> None:
        self.pool: Pool | None = None
        self.lease: Lease | None = None
        self.ticket: Ticket | None = None
        self.prompt_tokens = 0  # estimated
        self._budget: RetryBudget | None = None  # of `pool`, from the first retry there on
        self._free_retry_used = False
        self._retries = 0  # retries that count against a budget
        self._waits: list[tuple[str, float]] = []  # member's name, time it was sent the request
        self._queued_s = 0.0

    async def open(self) -> Answer:
        """Returns the answer of the first member that gives one, over all pools.

        Raises RequestError if the request is refused, or the BackendError of the last attempt.
        """
        last: OctetError | None = None
        for pool in self.pools:
            stopped = pool.phase in ("dormant", "given_up")
            if stopped and (last is not None or pool is not self.pools[-1]):
                continue  # it has no backends: the error of one that has some tells more
            try:
                await self._enter(pool)
                return await self._try_pool(pool)
            except UnsupportedField as error:
                last = last or error
            except RequestError as error:
                if error.status != 503 or self.deadlines.interrupting:
                    raise
                last = error
            except BackendError as error:
                last = error
            forget_frames(last)
        assert last is not None
        raise last

    def release(self) -> None:
        """Releases everything that the request holds. Idempotent; does not wait."""
        try:
            self._leave_member()
        finally:
            try:
                self._leave_pool()
            finally:
                ticket, self.ticket = self.ticket, None
                if ticket is not None:
                    ticket.release()

    @property
    def closing(self) -> bool:
        """True if a drain is over and running answers end."""
        return self.pool is not None and self.pool.closing

    @property
    def inter_token_s(self) -> float:
        assert self.pool is not None
        return self.pool.config.timeouts.inter_token_s

    @property
    def context_length(self) -> int | None:
        """Returns that of the backend that answers, in tokens; None if it is not known."""
        return self.lease.member.backend.context_length if self.lease is not None else None

    def succeeded(self) -> None:
        """Records that the answer is complete."""
        if self.lease is not None and self.operation.runs_model:
            self.lease.succeeded()

    def failed(self, error: BackendError) -> None:
        """Records that the answer broke off. Replaces addresses in `error` by the member's name."""
        if self.lease is not None:
            self.lease.failed(error)
            _without_address(error, self.lease.member)

    def settle(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Charges the key for these tokens."""
        if self.lease is not None:
            self.lease.served = prompt_tokens + completion_tokens
            self.lease.written = completion_tokens
        if self.ticket is not None:
            self.ticket.settle(prompt_tokens, completion_tokens)

    def expired(self, tokens: int) -> RequestError:
        """Returns the error for the deadline that passed; `tokens` had been sent to the client."""
        stage, total_s = self.deadlines.expired or "total", self.deadlines.total_s
        self.observation.metrics.deadlines.labels(stage).inc()
        what, at_fault = f"the deadline of {total_s:g} s passed", False
        if self.lease is not None and self.pool is not None:
            timeouts, name = self.pool.config.timeouts, self.lease.member.name
            if stage == "inter_token":
                what, at_fault = f"{name} was silent for {timeouts.inter_token_s:g} s", True
            else:  # a deadline shortened by the client says nothing about the backend
                at_fault = tokens == 0 and total_s >= timeouts.total_s
            if at_fault:
                self.lease.failed(BackendError(what, kind="timeout"))
        return self.too_late(what, tokens)

    def too_late(self, what: str, tokens: int = 0) -> RequestError:
        """Returns a 504 error that says where the time went; `tokens` had been sent until then."""
        spent = [f"{self._queued_s:.2f} s queued"]
        ends = [*(begun for _, begun in self._waits), time.monotonic()]
        for (name, begun), end in zip(self._waits, ends[1:], strict=True):
            spent.append(f"{end - begun:.2f} s waiting for {name}")
        sent = f"{tokens} tokens" if tokens else "nothing"
        return RequestError(
            f"{what}: {', '.join(spent)}; {sent} had been sent",
            status=504,
            code="deadline_exceeded",
            kind="timeout_error",
        )

    async def _enter(self, pool: Pool) -> None:
        """Waits for capacity. Raises RequestError if there is none, or the key is over a limit."""
        self._leave_pool()
        if pool.closing:
            raise shutting_down()
        unlimited = pool.config.admission.answer_tokens
        self.prompt_tokens, answer = self.operation.cost(self.call.body, unlimited)
        self.observation.estimated_prompt_tokens = self.prompt_tokens
        self.observation.pool = pool.name
        self._ask = ask_for(
            pool.config.routing, self.prompt_tokens + answer, self.call.data, self.headers
        )
        since = time.monotonic()
        deadline = since + self.deadlines.remaining_s
        before_s = 0.0 if self.ticket is None else self.ticket.queued_s
        try:
            self.ticket = await self._admitted(pool, deadline)
        finally:  # also counts a wait that ended without capacity
            self._queued_s += time.monotonic() - since
        self.observation.queued(self.ticket.queued_s - before_s)
        pool.active += 1
        self.pool = pool

    async def _admitted(self, pool: Pool, deadline: float) -> Ticket:
        """Returns the ticket of an admission to `pool`, new or moved from the pool before."""
        if self.ticket is not None:
            await self.ticket.move_to(pool, deadline=deadline)
            return self.ticket
        return await self.admission.admit(
            pool,
            self.principal,
            tokens=self._ask.tokens,
            deadline=deadline,
            prompt_tokens=self.prompt_tokens,
        )

    async def _try_pool(self, pool: Pool) -> Answer:
        """Returns the answer of the first member of `pool` that gives one.

        Raises the last failure, or the error that no member can take the request.
        """
        tried: list[Member] = []
        unfit: list[Member] = []  # members that do not support the request
        refusal: UnsupportedField | None = None
        failure: BackendError | None = None
        member = pool.choose(self._ask) or await self._next_member(pool, tried, unfit, failure)
        while member is not None:
            again = member in tried
            tried.append(member)
            try:
                return await self._attempt(pool, member, again=again)
            except UnsupportedField as error:  # another backend of the pool may accept the field
                forget_frames(error)
                refusal = refusal or error
                unfit.append(member)
                member = await self._next_member(pool, tried, unfit, failure)
                continue
            except BackendError as error:
                forget_frames(error)
                failure = error
            member = await self._next_member(pool, tried, unfit, failure)
            if member is None:
                break
            if failure.kind in _RETRIED_FREE and not self._free_retry_used:
                self._free_retry_used = True
            elif failure.kind != "refused":  # a refused connection is no load on the backend
                await self._may_retry(pool, failure)
                if not member.available:  # it may have changed during the backoff
                    member = await self._next_member(pool, tried, unfit, failure)
            if member is not None:
                self.observation.retried(failure.kind)
        if pool.closing:
            raise shutting_down()
        raise failure or _none_left(pool, refusal, unfit)

    async def _next_member(
        self, pool: Pool, tried: list[Member], unfit: list[Member], failure: BackendError | None
    ) -> Member | None:
        """Chooses the member to try after `failure`: an untried one, else one worth a retry."""
        again = failure is not None and failure.kind in _RETRIED_ON_SAME
        for barred in (tried, unfit) if again else (tried,):
            member = pool.choose(self._ask, barred)
            if member is None and await pool.checked(barred):
                member = pool.choose(self._ask, barred)
            if member is not None:
                return member
        later = self.pools[self.pools.index(pool) + 1 :]
        if any(other.available for each in later for other in each.members):
            return None
        waits = pool.returning
        if waits:
            assert self.ticket is not None
            self.ticket.pause()
            if await pool.returned(unfit, self.deadlines.remaining_s):
                return pool.choose(self._ask, unfit)
        # Waits for capacity only if the next attempt is outside the retry budget.
        free = failure is not None and failure.kind in _RETRIED_FREE and not self._free_retry_used
        if not (free or waits):
            return None
        barred = unfit if waits else tried
        return pool.choose(self._ask, barred) if await pool.has_capacity(barred) else None

    async def _may_retry(self, pool: Pool, failure: BackendError) -> None:
        """Returns when the request may be retried; raises `failure` if it may not.

        Its retries in all pools count together; the first attempt in a pool is not a retry. The
        request takes one place in the pool's budget, however often it is retried there.
        """
        budget, attempts = pool.budget, pool.config.retries.attempts
        if self._retries + 1 >= attempts or not (self._budget or budget.take()):
            self.observation.metrics.retries_exhausted.labels(pool.name).inc()
            raise failure
        self._budget = budget
        self._retries += 1
        if backoff_s := budget.backoff_s(self._retries):
            await asyncio.sleep(backoff_s)

    async def _attempt(self, pool: Pool, member: Member, *, again: bool) -> Answer:
        """Sends the request to `member`; `again` if this member was tried before.

        Raises BackendError if it fails, after that is recorded, and RequestError if it refuses.
        """
        if self.tier is not None:
            self.tier.require(pool)
        if self.ticket is not None:
            self.ticket.resume()
        lease = self.lease = member.lease(self._ask.tokens, again=again)
        lease.given_up = self.deadlines.give_up
        self.observation.attempt(pool.name, member.name, pool.precision or "")
        if self.observation.trace is not None:  # each attempt has a span of its own
            self.call.headers.update(self.observation.headers_out())
        self._waits.append((member.name, time.monotonic()))
        first_token_s = pool.config.timeouts.first_token_s
        if self.call.streamed:
            self.deadlines.within("first_token", first_token_s)
        try:
            answer = await self.operation.open(member.backend, self.call)
            if lease.maybe_restarted:
                await self._require_same(lease, answer)
        except _Restarted:
            self._leave_member()
            raise
        except RequestError as refused:
            self._leave_member()
            raise _without_address(refused, member) from None
        except (BackendError, asyncio.CancelledError) as failed:
            error = _fault_of(failed, self.deadlines, member, first_token_s)
            if error is not failed and error.kind == "timeout":  # the gateway's deadline passed
                self.observation.metrics.deadlines.labels("first_token").inc()
        else:
            return answer
        finally:
            self.deadlines.idle()
        if pool.closing:
            raise shutting_down()
        _log.warning("pool %s, %s: %s", pool.name, member.name, error)
        lease.failed(error)
        self._leave_member()
        raise _without_address(error, member)

    async def _require_same(self, lease: Lease, answer: Answer) -> None:
        """Raises _Restarted if the backend restarted, or lost its proof, since `lease` began.

        Then also closes `answer`.
        """
        restarted = True
        try:
            restarted = await lease.restarted()
        finally:
            if restarted and answer.rest is not None:
                await close(answer.rest)
        if restarted:
            name = lease.member.name
            line = f"{name} was restarted, or failed its proof, before its answer began"
            _log.warning("pool %s: %s", lease.member.pool, line)
            raise _Restarted(line, kind="lost")

    def _leave_member(self) -> None:
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.release()

    def _leave_pool(self) -> None:
        budget, self._budget = self._budget, None
        if budget is not None:
            budget.give_back()
        pool, self.pool = self.pool, None
        if pool is not None:
            pool.active -= 1


def _fault_of(
    failure: BackendError | asyncio.CancelledError,
    deadlines: Deadlines,
    member: Member,
    first_token_s: float,
) -> BackendError:
    """Returns what the backend did wrong: `failure`, a late first token, or a lost connection.

    Raises CancelledError if the request itself was cancelled. A backend's clean-up may turn a
    cancellation into any other exception, so `deadlines` decides.
    """
    if isinstance(failure, BackendError) and not deadlines.interrupting:
        return failure
    given_up, deadlines.given_up = deadlines.given_up, False
    late = deadlines.expired == "first_token" or (given_up and deadlines.expired is None)
    if deadlines.gone or not (late and deadlines.caught()):
        raise asyncio.CancelledError from failure
    if given_up:
        return BackendUnavailable(f"{member.name} disconnected before it sent a token", kind="lost")
    return BackendUnavailable(
        f"{member.name} sent no token within {first_token_s:g} s", kind="timeout"
    )


def _none_left(pool: Pool, refusal: UnsupportedField | None, unfit: list[Member]) -> OctetError:
    """Returns the error for a request that has no backend left to try.

    That is `refusal` if the members in `unfit` do not support the request. But if other members
    support it, and are only unavailable now, it is BackendUnavailable: after a refusal, a client
    would not retry.
    """
    tokenizes = isinstance(refusal, NeedsTokenizer)
    able = [
        member
        for member in pool.members
        if member.backend.accepts_extra or (tokenizes and member.backend.tokenizer is not None)
    ]
    if refusal is None:
        return _unavailable(pool, pool.members)
    if able and not any(member in able for member in unfit):
        return _unavailable(pool, able)
    return refusal


def _unavailable(pool: Pool, members: Sequence[Member]) -> BackendUnavailable:
    """Returns the error that no member is available, or that no reachable member is proven."""
    standings = Counter(member.standing for member in members)
    counts = [f"{standings[name]} {name}" for name in ("refused", "unproven") if standings[name]]
    message, retry_after_s = f"no backend of the pool '{pool.name}'", pool.retry_after_s(members)
    if counts and standings.keys() <= {"refused", "unproven", "unreachable", "not_ready"}:
        message += f" is proven ({', '.join(counts)})"
        return BackendUnproven(message, retry_after_s=retry_after_s)
    able = "" if len(members) == len(pool.members) else " that can take this request"
    return BackendUnavailable(f"{message}{able} is available now", retry_after_s=retry_after_s)


def _without_address(error: OctetError, member: Member) -> OctetError:
    """Replaces the member's addresses in `error` by its name: clients must not see addresses."""
    answer = error.answer if isinstance(error, AnsweredFailure) else None
    if answer is not None:
        for shown in member.addresses:
            answer.first = answer.first.replace(shown.encode(), member.name.encode())
    text = member.nameless(str(error))
    if text != str(error):
        error.args = (text,)
    return error
