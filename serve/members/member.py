"""One backend of a pool: its health, its load, and the requests assigned to it."""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import Literal, TypeAlias

from octet.errors import BackendError
from serve.backends.base import Backend, LoadReport, supervised
from serve.config import BackendConfig, Ejection
from serve.members.breaker import Breaker
from serve.members.proof_state import MemberProof

__all__ = ["Lease", "Member", "Standing"]

_log = logging.getLogger(__name__)

# Standing of a member: the first of these that applies.
#   leaving      it was removed, and finishes its requests
#   unreachable  no connection, or a new one that has not passed its checks yet
#   not_ready    it reports that it cannot serve
#   refused      it does not match its declared configuration
#   ejected      its breaker is open
#   unproven     its log-probabilities have not been checked yet, or not since it came back
#   full         it has as many requests as it may have at once
#   trial        its breaker is half-open: one request at a time
Standing: TypeAlias = Literal[
    "leaving", "unreachable", "not_ready", "refused", "ejected", "unproven", "full", "trial", "in"
]
_NEWEST = 0.1  # weight of the newest lease in the mean duration of leases
# A backend unreachable for this long will not answer requests that have no token yet: its engine
# may have stopped while its server waits, as with vLLM. A backend that shuts down in order has had
# time for a first token.
GONE_S = 10.0


class Member:
    """A backend and its standing.

    One that has not been checked yet counts as healthy, unless this process starts it.
    """

    def __init__(
        self,
        name: str,
        pool: str,
        backend: Backend,
        config: BackendConfig | None = None,
        *,
        origin: str = "config",
        ejection: Ejection | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`origin` is "config", "admin", or the discovery source that found it."""
        self.name = name
        self.origin = origin
        self.pool = pool
        self.backend = backend
        self.config = config
        self.max_in_flight = config.max_in_flight if config else None
        self._clock = clock
        # Set by the pool: decides whether failures may eject it; called when `available` may have
        # changed.
        self.may_eject: Callable[[], bool] = lambda: True
        self.changed: Callable[[], None] = lambda: None
        self.breaker = Breaker(
            ejection or Ejection(),
            clock=clock,
            may_open=lambda: self.may_eject(),
            changed=lambda: self.changed(),
        )

        self.reachable = self.ready = not supervised(backend)
        self.doubtful = False  # a request lost its connection, which is being checked
        self.leaving = False
        # When it became unreachable or not ready, by the clock.
        self.out_since: float | None = None if self.ready else clock()
        self.away_since: float | None = None  # when unreachable; kept until it comes in again
        self._last_error = ""
        self.last_error_at = self.came_in_at = -math.inf  # by the clock
        self.on_doubt: Callable[[], None] | None = None  # set while a health check runs
        self.checked = asyncio.Event()  # set while it is not doubtful
        self.checked.set()

        self.proof: MemberProof | None = None  # None: no proof is required
        self.incarnation = 0  # counts its incarnations, and the proofs that were withdrawn
        self.served_tokens = 0  # clients' prompts and answers, as counted or estimated
        self.written_tokens = 0  # the answers' part of them

        self.waiting: set[Lease] = set()  # requests without a token
        self.in_flight = 0  # requests
        self.outstanding_tokens = 0
        self.mean_lease_s: float | None = None
        self.idle = asyncio.Event()  # set while it has no request
        self.idle.set()
        self.last_success = -math.inf  # a token, an answer or a probe, by the clock

        self.report: LoadReport | None = None
        self.reported_at = -math.inf  # by the clock
        self.reported_tokens = 0  # outstanding when the report was requested
        self.reported_in_flight = 0  # requests in flight when the report was requested
        self.last_stir = -math.inf  # when its load report last showed that it generates
        self.capacity_tokens: int | None = None  # of its KV cache, as last reported

    def __repr__(self) -> str:
        return f"<Member {self.pool}/{self.name}: {self.standing}>"

    @property
    def up(self) -> bool:
        """Returns whether it serves, even if it is full."""
        return self.standing in ("in", "trial", "full")

    @property
    def available(self) -> bool:
        """Returns whether it may get one more request."""
        return (
            self.reachable
            and self.ready
            and (self.proof is None or self.proof.admits)
            and not self.leaving
            and not self._full()
            and self.breaker.admits
        )

    @property
    def standing(self) -> Standing:
        if self.leaving:
            return "leaving"
        if not self.reachable:
            return "unreachable"
        if not self.ready:
            return "not_ready"
        proof = None if self.proof is None else self.proof.state
        if proof == "refused":
            return "refused"
        state = self.breaker.state
        if state == "open":
            return "ejected"
        if proof == "unproven":
            return "unproven"
        if self._full():
            return "full"
        return "trial" if state == "half_open" else "in"

    @property
    def awaits_check(self) -> bool:
        """Returns whether it is doubtful, and requests wait until it is checked.

        One that needs a proof must still be in the incarnation that was proven, and a process that
        the gateway supervises is soon started again after it died.
        """
        return self.doubtful and (self.proof is not None or supervised(self.backend))

    @property
    def returning(self) -> bool:
        """Returns whether it is a supervised process that is being started, and may serve soon."""
        if not supervised(self.backend) or self.backend.gave_up:
            return False
        standing = self.standing
        ended = standing == "ejected" and self.breaker.certain  # its server says that it is dead
        return ended or standing in ("unreachable", "not_ready", "unproven")

    def lease(self, tokens: int, *, again: bool = False) -> "Lease":
        """Assigns it a request of `tokens` tokens, until the lease is released.

        `again`: it has failed the same request before.
        """
        return Lease(self, tokens, self._clock, again=again)

    @property
    def last_error(self) -> str:
        """The text of the last error, for people."""
        return self._last_error

    @last_error.setter
    def last_error(self, error: str) -> None:
        self._last_error, self.last_error_at = error, self._clock()

    @property
    def recovered(self) -> bool:
        """Returns whether it serves, and was readmitted or succeeded since its last error."""
        return self.up and max(self.last_success, self.came_in_at) > self.last_error_at

    def come_in(self) -> None:
        """Marks it as reachable and ready."""
        if not (self.reachable and self.ready):
            self.came_in_at = self._clock()
        self.reachable = self.ready = True
        self._settle()
        self.out_since = self.away_since = None
        self.changed()

    def go_out(self, error: str, *, reachable: bool) -> None:
        """Marks it as unreachable, or as reachable but not ready."""
        if not reachable:
            self.forget("its connection ended")
        self.reachable, self.ready = reachable, False
        self._settle()
        self.last_error = error
        now = self._clock()
        if self.out_since is None:
            self.out_since = now
        if not reachable and self.away_since is None:
            self.away_since = now
        self.changed()

    def missed(self) -> None:
        """Handles a failed reconnection; after `GONE_S`, gives up requests without a token."""
        if self.away_since is not None and self._clock() - self.away_since >= GONE_S:
            for lease in list(self.waiting):
                lease.given_up()

    def doubt(self, error: str) -> None:
        """Handles a lost connection: others get the requests until a health check has run."""
        self.last_error = error
        if self.on_doubt is not None and self.reachable:
            self.reachable, self.doubtful = False, True
            self.checked.clear()
            self.changed()
            self.on_doubt()

    def forget(self, reason: str) -> None:
        """Discards the proof, because another incarnation may answer from now on."""
        self.incarnation += 1  # also without a proof: one may be in preparation
        if self.proof is not None:
            self.proof.forget(f"not probed yet: {reason}")
            self.changed()

    def nameless(self, text: str) -> str:
        """Replaces the backend's address in `text` by its name: clients must not see addresses."""
        for shown in self.addresses:
            text = text.replace(shown, self.name)
        return text

    @property
    def addresses(self) -> tuple[str, ...]:
        """Returns the forms of its address that errors may contain, the longest first."""
        kind_and_address = self.backend.name
        address = kind_and_address.split(" ", 1)[-1]
        bare = address.partition("://")[2] or address
        return (kind_and_address, address, bare)

    def failed(self, error: BackendError, epoch: int, *, again: bool = False) -> None:
        """Records a failed request that began in `epoch` of the breaker; `again` as in `lease`."""
        self.last_error = str(error)
        opened = self.breaker.failed(epoch, error.kind, again=again)
        if opened:
            _log.warning("%s/%s is ejected: %s", self.pool, self.name, error)
        if error.kind in ("refused", "lost"):
            self.doubt(str(error))

    def leave(self) -> None:
        """Stops new requests; `idle` is set when the last one has ended."""
        self.leaving = True
        self.changed()

    def reported(self, report: LoadReport, outstanding_tokens: int, in_flight: int) -> None:
        """Stores its load report; the counts are those when the report was requested."""
        last, now = self.report, self._clock()
        if last and (last.running, last.kv_usage) != (report.running, report.kv_usage):
            self.last_stir = now
        self.report, self.reported_at = report, now
        self.reported_tokens, self.reported_in_flight = outstanding_tokens, in_flight
        if report.capacity_tokens is not None:
            self.capacity_tokens = report.capacity_tokens

    def _settle(self) -> None:
        self.doubtful = False
        self.checked.set()

    def _full(self) -> bool:
        return self.max_in_flight is not None and self.in_flight >= self.max_in_flight

    def _took(self, tokens: int) -> None:
        self.in_flight += 1
        self.outstanding_tokens += tokens
        self.idle.clear()
        if self._full():
            self.changed()

    def _released(self, tokens: int, seconds: float) -> None:
        if self._full():
            self.changed()
        self.in_flight -= 1
        self.outstanding_tokens -= tokens
        if self.in_flight == 0:
            self.idle.set()
        mean = seconds if self.mean_lease_s is None else self.mean_lease_s
        self.mean_lease_s = mean + _NEWEST * (seconds - mean)


class Lease:
    """One request at one member. The first outcome counts; without one, the client went away."""

    __slots__ = (
        *("_again", "_began", "_clock", "_epoch", "_incarnation", "_open", "_silent"),
        *("_undecided", "given_up", "member", "served", "tokens", "written"),
    )

    def __init__(
        self, member: Member, tokens: int, clock: Callable[[], float], *, again: bool = False
    ) -> None:
        self.member = member
        self.tokens = tokens
        self._clock = clock
        self._began = clock()
        self._epoch = member.breaker.begin()
        self._incarnation = member.incarnation
        self.served = 0  # prompt and answer tokens, once they are known
        self.written = 0  # the answer's part of them
        # Called if the backend seems to be gone for good before a token came.
        self.given_up: Callable[[], None] = lambda: None
        self._again = again
        self._silent = self._undecided = True
        self._open = True
        member.waiting.add(self)
        member._took(tokens)

    @property
    def maybe_restarted(self) -> bool:
        """Returns whether another incarnation than the one it began with may be answering.

        If so, an answer that begins now may come from any server. Always False if no proof is
        required.
        """
        member = self.member
        if member.proof is None:
            return False
        return member.doubtful or member.incarnation != self._incarnation

    async def restarted(self) -> bool:
        """Waits for a pending health check; returns whether another incarnation runs by now."""
        await self.member.checked.wait()
        return self.member.incarnation != self._incarnation

    def progressed(self) -> None:
        """Records new tokens: the backend is busy, not dead. The outcome is still to come."""
        self.member.last_success = self._clock()
        if self._silent and self._undecided:
            self._silent = False
            self.member.waiting.discard(self)
            self._epoch = self.member.breaker.progressed(self._epoch)

    def succeeded(self) -> None:
        if self._undecided:
            self._undecided = False
            self.member.last_success = self._clock()
            self.member.breaker.succeeded(self._epoch)

    def failed(self, error: BackendError) -> None:
        """Records a failure. Not for a request that the backend refused as its client's mistake."""
        if self._undecided:
            self._undecided = False
            self.member.failed(error, self._epoch, again=self._again)

    def release(self) -> None:
        """Ends the lease. Must always be called; safe to call again."""
        if self._open:
            self._open = False
            self.member.waiting.discard(self)
            if self._undecided:
                self._undecided = False
                self.member.breaker.abandoned(self._epoch)
            self.member.served_tokens += self.served
            self.member.written_tokens += self.written
            self.member._released(self.tokens, self._clock() - self._began)
