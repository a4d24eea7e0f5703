"""Active health checks: one supervised task per member.

Each runs three loops at once. The first holds a connection, whose end is the end of the server, and
polls the server's readiness. The second reads its load. The third generates a real token when no
request has succeeded recently: Triton reports READY for a model whose process is dead. A member
that was out is readmitted only after all of: connection, readiness, one token.
"""

import asyncio
import contextlib
import contextvars
import logging
import random
from collections.abc import Callable
from typing import Any

from octet.errors import BackendError
from serve.backends.base import LoadReport
from serve.config import Health
from serve.members.member import Member
from serve.proof.prover import Prover
from serve.routing.incarnation import Incarnations

__all__ = ["Watch"]

_log = logging.getLogger(__name__)


class Watch:
    """Keeps the health state of one member up to date."""

    def __init__(
        self,
        member: Member,
        config: Health,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self._member = member
        self._config = config
        self._clock = clock
        self._rng = rng
        self._task: asyncio.Task[None] | None = None
        self._doubt = asyncio.Event()
        self.prover: Prover | None = None  # None: no proof is required
        self._incarnations = Incarnations(member, clock)
        self._unread = ""  # why its load could not be read the last time
        self.checked = asyncio.Event()  # the first check has ended

    def start(self) -> None:
        self._member.on_doubt = self._doubt.set
        self.take(self._config)
        # Not in the caller's context: it may belong to a request, whose id the log would show.
        self._task = asyncio.create_task(self._run(), context=contextvars.Context())

    def take(self, config: Health) -> None:
        """Applies these settings from now on."""
        self._config = config
        self._member.breaker.probed = config.probe_after_s is not None
        self._member.changed()

    def prove(self, prover: Prover | None) -> None:
        """Uses `prover` to prove the member from now on; None: no proof is required."""
        before, self.prover = self.prover, prover
        self._member.proof = None if prover is None else prover.proof
        if prover is not None:
            prover.installed(None if before is None else before.proof)
        self._member.changed()
        if prover is not None:
            prover.start()
            if self.checked.is_set():
                prover.wake()
        if before is not None:
            before.cancel()

    async def stop(self) -> None:
        self._member.on_doubt = None
        self._member.breaker.probed = False
        self._member.changed()
        if self.prover is not None:
            await self.prover.stop()
        if self._task is not None:
            await _ended(self._task)
        if self._member.doubtful:  # no check will follow, so wake the waiting requests
            self._member.go_out("its health checks have stopped", reachable=False)

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._keep_connected())
                    group.create_task(self._keep_proving())
                    group.create_task(self._keep_reading())
            except* Exception:
                _log.exception(
                    "the health check of %s failed; starting it again", self._member.name
                )
            await asyncio.sleep(self._config.reconnect_s)

    async def _keep_connected(self) -> None:
        while True:
            held = asyncio.create_task(self._hold())
            try:
                await self._while_held(held)
            finally:
                await _ended(held)
            self.checked.set()
            self._member.missed()
            await asyncio.sleep(self._config.reconnect_s)

    async def _hold(self) -> None:
        """Holds the connection. At its end, takes the member out at once, even during a check.

        That happens before this task ends, because the next request might be answered by another
        incarnation.
        """
        try:
            await self._member.backend.hold(self._incarnations.reopened)
            reason = "its connection ended"
        except BackendError as error:
            reason = str(error)
        except Exception as error:
            reason = repr(error)
        self._incarnations.ended()
        self._go_out(reason, reachable=False)
        self._doubt.set()

    async def _while_held(self, held: asyncio.Task[None]) -> None:
        """Polls readiness at intervals; sooner if a request lost its connection."""
        member = self._member
        while not held.done():
            config = self._config
            self._doubt.clear()
            sent_at = self._clock()
            refusal = "it is not ready"
            try:
                ready = await self._query_ready(held)
            except Exception as error:  # a defect; the next check may succeed
                ready, refusal = False, f"its check failed: {error!r}"
            if held.done():
                return
            if ready:
                await self._readmit(held)
            elif ready is None and self._busy_since(sent_at - config.interval_s):
                member.come_in()  # it was only too busy to answer
            else:
                self._incarnations.uncertain |= ready is False
                silent = f"it does not report within {config.timeout_s:g} s whether it is ready"
                self._go_out(refusal if ready is False else silent, reachable=True)
            self.checked.set()
            if self.prover is not None:
                self.prover.wake()
            pause_s = config.interval_s if member.ready else config.reconnect_s
            # Not wait_for: in Python 3.11 it loses a cancellation that comes with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._doubt.wait()

    def _busy_since(self, moment: float) -> bool:
        """Returns whether it is in service, and is known to have worked since `moment`."""
        member = self._member
        if self._incarnations.uncertain:
            return False
        return member.out_since is None and max(member.last_success, member.last_stir) >= moment

    async def _query_ready(self, held: asyncio.Task[None]) -> bool | None:
        """Queries readiness; None if no answer comes in time, or the connection ends meanwhile."""
        query = asyncio.ensure_future(self._member.backend.ready())
        try:
            await asyncio.wait(
                {query, held},
                timeout=self._config.timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            return query.result() if query.done() else None
        finally:
            await _ended(query)

    async def _readmit(self, held: asyncio.Task[None]) -> None:
        """Brings in a ready member. One that was out generates a token and gets a fresh breaker."""
        member = self._member
        await self._incarnations.recognize(held, self._config.timeout_s)
        if held.done() or self._incarnations.uncertain:
            return
        if member.out_since is not None:
            failure = None
            if self._config.probe_after_s is not None:
                try:
                    await self._probe()
                except BackendError as error:
                    failure = error
                if held.done():
                    return
            member.breaker.reset()
            if failure is not None:
                self._eject(failure)
            else:
                _log.info("%s/%s is back", member.pool, member.name)
        member.come_in()

    async def _keep_proving(self) -> None:
        """Generates a token when due: no request succeeded recently, or an ejection is over."""
        member, breaker = self._member, self._member.breaker
        await self.checked.wait()
        while True:
            config, now = self._config, self._clock()
            if config.probe_after_s is None or not member.ready:
                # A member that is out generates a token anyway when it is readmitted.
                await asyncio.sleep(config.reconnect_s)
                continue
            due_at = member.last_success + config.probe_after_s
            if breaker.state == "open":
                due_at = breaker.until
            if due_at > now:
                await asyncio.sleep(min(due_at - now, config.reconnect_s))
            else:
                await self._prove()

    async def _prove(self) -> None:
        member, breaker = self._member, self._member.breaker
        epoch = breaker.epoch
        proved, failure = False, None
        try:
            proved = await self._probe()
        except BackendError as error:
            failure = error
        if epoch != breaker.epoch or not member.ready:
            return  # there is newer information than the probe's
        if failure is not None:
            self._eject(failure)
        elif proved:
            breaker.proved()
        else:
            await asyncio.sleep(self._config.interval_s)

    async def _probe(self) -> bool:
        """Generates a token; returns False if it is too busy. Other failures raise BackendError."""
        member, began = self._member, self._clock()
        try:
            async with asyncio.timeout(self._config.probe_timeout_s):
                try:
                    await member.backend.probe()
                except BackendError as error:
                    # The server may have closed an idle connection just then. A request would be
                    # sent again, and so is the probe.
                    if error.kind != "lost":
                        raise
                    await member.backend.probe()
        except Exception as error:
            if max(member.last_success, member.last_stir) > began:
                return False  # real requests went on meanwhile
            if isinstance(error, TimeoutError):
                limit = f"no token within {self._config.probe_timeout_s:g} s"
                raise BackendError(limit, kind="timeout") from None
            if not isinstance(error, BackendError):
                raise BackendError(repr(error)) from None
            if error.kind == "overloaded":
                return False
            raise
        member.last_success = self._clock()
        return True

    def _eject(self, error: BackendError) -> None:
        member = self._member
        member.last_error = f"its probe failed: {error}"
        member.breaker.trip()
        _log.warning("%s/%s is ejected: %s", member.pool, member.name, member.last_error)

    def _go_out(self, error: str, *, reachable: bool) -> None:
        member = self._member
        if member.out_since is None:
            _log.warning("%s/%s is out: %s", member.pool, member.name, error)
        member.go_out(error, reachable=reachable)

    async def _keep_reading(self) -> None:
        """Reads its load at jittered intervals, so that members are read at different times."""
        member = self._member
        while True:
            config = self._config
            if member.reachable:
                before = member.outstanding_tokens, member.in_flight
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(config.timeout_s):
                        report = await self._read_load()
                    if report is not None:
                        member.reported(report, *before)
            await asyncio.sleep(config.load_interval_s * self._rng.uniform(0.9, 1.1))

    async def _read_load(self) -> LoadReport | None:
        """Returns its load; None if it reports none or a defect prevents it: it may still serve."""
        problem, report = "", None
        try:
            report = await self._member.backend.load()
        except Exception as error:
            problem = repr(error)
            if problem != self._unread:
                _log.warning(
                    "%s/%s: its load cannot be read: %s",
                    self._member.pool,
                    self._member.name,
                    problem,
                )
        self._unread = problem
        return report


async def _ended(task: "asyncio.Future[Any]") -> None:
    """Cancels `task` if it still runs; returns when it has ended."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # marks the exception as retrieved
