"""One pool's token budget and the queue before it.

`DrainRate` measures how fast tokens leave the pool, and so predicts when there is capacity again.
"""

import asyncio
import math
import random
import time
from collections.abc import Callable

from octet.errors import RequestError
from serve.admission.fair_queue import FairQueue, Flow

__all__ = ["DrainRate", "Gate", "Overloaded", "overloaded"]

KEPT = 0.8  # weight of earlier requests in the mean stay, when one more ends
STAYS = 4  # number of mean stays that the rate averages over: requests of a batch end together
SHORTEST_S = 5.0  # shortest time that the rate averages over
LONGEST_WAIT_S = 600.0


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


class DrainRate:
    """Tokens per second that leave a pool, counted only while requests wait.

    Without a queue it would measure the demand. When a queue forms, the first estimate is Little's
    law: the tokens in flight, divided by the mean time that a token stays. From then on it is an
    exponentially weighted average of the tokens that really leave, so that a stalled backend shows.
    """

    __slots__ = ("_at", "_rate", "_since", "_stayed", "_tokens")

    def __init__(self) -> None:
        self._stayed = 0.0  # token seconds of requests that ended, decayed
        self._tokens = 0.0  # and their tokens
        self._since: float | None = None  # when the queue formed
        self._rate: float | None = None  # tokens per second at `_at`; None: none has ever left
        self._at = 0.0

    @property
    def stay_s(self) -> float:
        """Mean time that a token is in flight; 0 before any has left."""
        return self._stayed / self._tokens if self._tokens else 0.0

    def queued(self, in_flight: int, now: float) -> None:
        """Records that a queue has formed with `in_flight` tokens in flight."""
        self._at = self._since = now
        self._rate = self._by_stay(in_flight)

    def emptied(self) -> None:
        """Records that nothing waits any more."""
        self._since = None

    def left(self, tokens: int, stay_s: float, in_flight: int, now: float) -> None:
        """Records that a request of `tokens`, out of `in_flight`, has ended after `stay_s`."""
        self._stayed = KEPT * self._stayed + tokens * stay_s
        self._tokens = KEPT * self._tokens + tokens
        if self._since is None:
            return
        if self._rate is None:
            self._rate = self._by_stay(in_flight)
        else:
            self._rate = self._decayed(self._rate, now) + tokens / self._span_s
        self._at = now

    def wait_s(self, tokens: int, in_flight: int, now: float) -> float:
        """Returns the seconds until `tokens` have left: at least 1, at most ten minutes."""
        if self._since is None:
            rate = self._by_stay(in_flight)
        else:
            rate = self._rate if self._rate is None else self._decayed(self._rate, now)
        if rate is not None:
            wait_s = tokens / rate if rate else math.inf
        else:  # nothing has left yet: it will probably take as long again
            wait_s = now - self._since if self._since is not None else 0.0
        return min(max(wait_s, 1.0), LONGEST_WAIT_S)

    def _by_stay(self, in_flight: int) -> float | None:
        return in_flight / max(self.stay_s, 1e-3) if self._tokens else None

    def _decayed(self, rate: float, now: float) -> float:
        return rate * math.exp(-(now - self._at) / self._span_s)

    @property
    def _span_s(self) -> float:
        return max(SHORTEST_S, STAYS * self.stay_s)


# Clients given the same time would all come back at once, so up to a quarter is added.
SPREAD = 0.25
_STEP_S = 1.0  # after which a wait looks again whether a backend starts
DOUBT = 2.0  # factor by which the next tokens may stay shorter than the mean


def _never() -> bool:
    return False


class _Waiter:
    __slots__ = ("expiry", "flow", "future", "granted", "tokens", "waited_s")

    def __init__(self, flow: Flow, tokens: int, future: asyncio.Future[None]) -> None:
        self.flow = flow
        self.tokens = tokens
        self.future = future
        self.granted = False
        self.expiry: asyncio.TimerHandle | None = None
        self.waited_s = 0.0  # when `expiry` comes


class Gate:
    """Limits the tokens in flight to `limit`, except for one larger request, which runs alone.

    Its own methods change nothing but this object: all run on one event loop.
    """

    def __init__(
        self,
        pool: str,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.pool = pool
        self.limit: int | None = None  # tokens
        self.tokens = 0  # in flight
        self.requests = 0
        self.queue = FairQueue()
        self.drain = DrainRate()
        self._clock = clock
        self._chance = chance

    def set_limit(self, limit: int | None) -> None:
        if limit != self.limit:
            self.limit = limit
            self._admit_waiting()

    def try_enter(self, flow: Flow, tokens: int) -> bool:
        """Admits a request at once, if none waits and there is capacity."""
        if self.queue or not self._fits(tokens):
            return False
        self.queue.pass_by(flow, tokens)
        self.tokens += tokens
        self.requests += 1
        return True

    async def wait(
        self,
        flow: Flow,
        tokens: int,
        *,
        max_queue: int,
        max_wait_s: float,
        deadline: float | None,
        starting: Callable[[], bool] = _never,
    ) -> None:
        """Returns when the request is admitted. If cancelled, it leaves no trace.

        Raises RequestError: 503 if the queue is full, or `max_wait_s` is over, or at once if that
        is certain to happen; 504 at the deadline (a time of `clock`). While `starting()`, nothing
        is served: that time does not count, to the second, and the request keeps its place.
        """
        if not starting():
            self._require_in_time(flow, tokens, max_wait_s)
        waiter = self._enqueue(flow, tokens, max_queue, max_wait_s)
        self._set_expiry(waiter, max_wait_s, max_wait_s, deadline, starting)
        try:
            await waiter.future
        except BaseException:
            self._abandon(waiter)
            raise
        finally:
            assert waiter.expiry is not None
            waiter.expiry.cancel()

    def leave(self, tokens: int, stay_s: float | None) -> None:
        """Releases the tokens of an admitted request that ended after `stay_s`.

        None: no backend served it, so it says nothing about how fast they are.
        """
        if stay_s is not None:
            self.drain.left(tokens, stay_s, self.tokens, self._clock())
        self.tokens -= tokens
        self.requests -= 1
        if self.queue:
            self._admit_waiting()

    def retry_after_s(self, tokens: int, priority: int = 0, max_wait_s: float = math.inf) -> float:
        """Returns the seconds until a request of `tokens` finds capacity behind the current queue.

        The result is at least 1. After `max_wait_s`, every request that waits now has left the
        queue.
        """
        before = self.queue.tokens_before(priority) + tokens
        free = self.limit - self.tokens if self.limit is not None else 0
        wait_s = self.drain.wait_s(max(before - free, 1), self.tokens, self._clock())
        return max(1.0, min(wait_s, max_wait_s)) * (1.0 + SPREAD * self._chance())

    def _require_in_time(self, flow: Flow, tokens: int, max_wait_s: float) -> None:
        """Raises RequestError (503) if a request would certainly wait too long.

        That is so if its turn would not come in time even in a pool that is always full, and in
        which tokens stay shorter than the mean by the factor `DOUBT`. Before the first token has
        left, nothing is known, and no request is refused.
        """
        assert self.limit is not None
        within = DOUBT * max_wait_s * self.limit  # token seconds
        stay_s = self.drain.stay_s
        free = self.limit - self.tokens - min(tokens, self.limit)  # a larger one goes alone
        if (self.queue.tokens - free) * stay_s <= within:
            return
        if (self.queue.tokens_ahead(flow) - free) * stay_s > within:
            raise overloaded(
                f"'{self.pool}' will have no capacity within {max_wait_s:g} s",
                self.retry_after_s(tokens, flow.level.priority, max_wait_s),
                reason="queue_too_long",
            )

    def _fits(self, tokens: int) -> bool:
        return self.limit is None or self.tokens + tokens <= self.limit or not self.requests

    def _enqueue(self, flow: Flow, tokens: int, max_queue: int, max_wait_s: float) -> _Waiter:
        if len(self.queue) >= max_queue:
            self._make_place(flow, tokens, max_queue, max_wait_s)
        waiter = _Waiter(flow, tokens, asyncio.get_running_loop().create_future())
        if not self.queue:
            self.drain.queued(self.tokens, self._clock())
        self.queue.push(flow, waiter, tokens)
        self._admit_waiting()  # a higher priority that fits may go before those that wait
        return waiter

    def _make_place(self, flow: Flow, tokens: int, max_queue: int, max_wait_s: float) -> None:
        found = self.queue.to_push_out(flow) if max_queue else None
        if found is None:
            raise self._full(flow, tokens, max_wait_s)
        other, waiter = found
        assert isinstance(waiter, _Waiter)
        if not waiter.future.done():
            waiter.future.set_exception(self._full(other, waiter.tokens, max_wait_s))
        self.queue.remove(other, waiter)

    def _full(self, flow: Flow, tokens: int, max_wait_s: float) -> RequestError:
        return overloaded(
            f"the queue of '{self.pool}' is full: {len(self.queue)} requests wait",
            self.retry_after_s(tokens, flow.level.priority, max_wait_s),
            reason="queue_full",
        )

    def _admit_waiting(self) -> None:
        """Admits the requests whose turn it is, as long as they fit."""
        while (found := self.queue.first()) is not None:
            flow, waiter, tokens = found
            assert isinstance(waiter, _Waiter)
            if waiter.future.done():  # cancelled, but its task has not run yet
                self.queue.remove(flow, waiter)
                continue
            if not self._fits(tokens):
                return
            self.queue.pop(flow)
            self.tokens += tokens
            self.requests += 1
            waiter.granted = True
            waiter.future.set_result(None)
        self.drain.emptied()

    def _set_expiry(
        self,
        waiter: _Waiter,
        left_s: float,
        max_wait_s: float,
        deadline: float | None,
        starting: Callable[[], bool],
    ) -> None:
        """Ends the wait after `left_s` more without a start, or at the deadline."""
        until_deadline_s = math.inf if deadline is None else deadline - self._clock()
        step_s = max(min(left_s, until_deadline_s, _STEP_S), 0.0)
        began_in_start = starting()

        def expire() -> None:
            waiter.waited_s += step_s
            left = left_s if began_in_start or starting() else left_s - step_s
            late = step_s >= until_deadline_s and left > 0
            if not late and left > 0:
                self._set_expiry(waiter, left, max_wait_s, deadline, starting)
            elif not waiter.future.done():
                self._expire(waiter, max_wait_s, late)

        waiter.expiry = waiter.future.get_loop().call_later(step_s, expire)

    def _expire(self, waiter: _Waiter, max_wait_s: float, late: bool) -> None:
        self.queue.remove(waiter.flow, waiter)
        if late:
            error = RequestError(
                f"the request's deadline passed: {waiter.waited_s:.3f} s were spent in the "
                f"queue of '{self.pool}', none on a backend",
                status=504,
                code="deadline_exceeded",
                kind="timeout_error",
            )
        else:
            error = overloaded(
                f"'{self.pool}' had no capacity within {max_wait_s:g} s",
                self.retry_after_s(waiter.tokens, waiter.flow.level.priority, max_wait_s),
                reason="queue_timeout",
            )
        waiter.future.set_exception(error)

    def _abandon(self, waiter: _Waiter) -> None:
        """Removes a request that will not run, whether it is queued or admitted by now."""
        if waiter.granted:  # admitted, but its task was cancelled before it ran
            self.tokens -= waiter.tokens
            self.requests -= 1
        elif waiter in waiter.flow.waiting:
            self.queue.remove(waiter.flow, waiter)
        self._admit_waiting()  # the removed request may have been the one that did not fit
