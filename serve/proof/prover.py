"""Proves one backend: probes it before it serves, and repeatedly while it serves.

unproven: golden prompts are sent in several steps, until the verdict is clear. A backend whose
log-probabilities do not match is refused. Without a verdict (it is too busy, or returned too few
answers) it is not refused, but probed again, after a longer delay each time. A refused backend is
probed again too, because it may have been repaired.

proven: a few prompts are sent at a time, within a token allowance, and judged together with the
earlier answers. A suspicious result ejects the backend at once, and every prompt is sent again:
only a whole probe refuses. A backend that is too busy, or whose answers are inconclusive, stays in.
"""

import asyncio
import contextlib
import contextvars
import logging
import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from octet.errors import BackendError, BackendUnavailable
from octet.proof.verdict import Verdict
from serve.config.proof import Proof
from serve.members.member import Member
from serve.members.proof_state import PROVEN, MemberProof, ProofState, measured
from serve.proof.admission import OVER, Examined, examine, silent
from serve.proof.exam import Exam
from serve.proof.probe import Probed, Unprovable
from serve.proof.recheck import Rounds

__all__ = ["REFUSED_S", "UNCLEAR_S", "Backoff", "Prover", "allowance"]

_log = logging.getLogger(__name__)
_POLL_S = 1.0  # no event signals that enough tokens were served, or that an ejection is over


class Prover:
    """Keeps `member.proof` up to date once it is installed there, and `start`ed."""

    def __init__(
        self,
        member: Member,
        exam: Exam,
        config: Proof,
        *,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self.exam = exam
        self.config = config
        self.proof = MemberProof(exam.label, exam.identity, clock)
        self.concluded = asyncio.Event()  # the first admission has ended, whatever its result
        self._member = member
        self._clock = clock
        self._rng = rng
        self._backoff = Backoff(rng)
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._incarnation = member.incarnation  # that the state below belongs to
        self._rounds: Rounds | None = None  # since its last whole probe
        self._suspected = False  # a probe looked wrong; a whole probe has not cleared it yet
        self._requested = False  # an administrator asked for a whole probe
        self._sent: tuple[int, asyncio.Task[Probed]] | None = None  # incarnation, last query

    def installed(self, before: MemberProof | None) -> None:
        """Takes over from `before`: `member.proof` is this prover's from now on."""
        if before is not None:
            self.proof.carry(before)
        if self._incarnation != self._member.incarnation:
            self.proof.forget("not probed yet: it was restarted while its settings changed")

    def take(self, config: Proof) -> None:
        """Applies these settings from now on."""
        before, self.config, proof = self.config, config, self.proof
        proof.next_at = min(proof.next_at, self._clock() + config.every_s)
        if before.without_logprobs != config.without_logprobs:
            if proof.state == "admitted":
                self._conclude(silent(config.without_logprobs))
            elif proof.state == "refused":  # perhaps for missing log-probabilities
                proof.next_at = -math.inf

    def start(self) -> None:
        # Not in the caller's context: it may belong to a request, whose id the log would show.
        self._task = asyncio.create_task(self._run(), context=contextvars.Context())

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def stop(self) -> None:
        self.cancel()
        if self._task is not None:
            await asyncio.wait({self._task})

    def wake(self) -> None:
        """Wakes the prover after a health check: the backend may be available or restarted."""
        incarnation, sent = self._sent or (0, None)
        if sent is not None and incarnation != self._member.incarnation:
            sent.cancel()  # the old incarnation may never answer
        self._wake.set()

    def prove_again(self) -> None:
        """Makes the next probe one of all golden prompts, due now. The backend serves meanwhile."""
        if not self.proof.probing:
            self._requested = True
            self._wake.set()

    async def _run(self) -> None:
        await self._wake.wait()  # nothing is known before the first health check
        while True:
            self._wake.clear()
            due = self._requested or self.proof.next_at <= self._clock()
            if due and self._may_probe():
                try:
                    await self._probe()
                except Exception as error:
                    self._unclear(self._defect(error))
            due_in_s = self.proof.next_at - self._clock()
            # Not wait_for: in Python 3.11 it loses a cancellation that comes with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(due_in_s if 0 < due_in_s < _POLL_S else _POLL_S):
                    await self._wake.wait()

    def _may_probe(self) -> bool:
        member = self._member
        up = member.reachable and member.ready and not member.leaving
        return up and member.breaker.state != "open"

    async def _probe(self) -> None:
        if self._incarnation != self._member.incarnation:
            self._incarnation = self._member.incarnation
            self._backoff.reset()
            self._suspected = False
        if self.proof.admits and self._rounds is not None and not self._requested:
            await self._recheck(self._rounds)
        else:
            await self.admit()

    async def admit(self) -> None:
        """Runs a whole probe and applies its result. Uses no earlier answers."""
        proof, member, incarnation = self.proof, self._member, self._member.incarnation
        every_prompt = self._suspected or self._requested
        proof.probing, proof.seconds, self._requested = True, 0.0, False
        try:
            found = await self._examined(every_prompt)
            if incarnation == member.incarnation:  # else it was restarted, and is probed again
                self._conclude(found)
        finally:
            proof.probing = False
            self.concluded.set()

    async def _examined(self, every_prompt: bool) -> Examined:
        seed, without = self._rng.getrandbits(32), self.config.without_logprobs
        backend, send = self._member.backend, self._sender()
        probe = examine(
            *(self.exam, backend, send, seed, without),
            every_prompt=every_prompt,
            timeout_s=self.config.timeout_s,
        )
        found = await self._found(probe)
        if found.view is not None:
            self.proof.tokens += found.view.tokens
        return found

    def _sender(self) -> Callable[[tuple[int, ...]], Awaitable[Probed]]:
        """Returns the function that sends one probe's prompts, all within the probe's time limit.

        The time for judging does not count.
        """
        incarnation = self._member.incarnation
        whole_s = left_s = self.config.timeout_s

        async def send(records: tuple[int, ...]) -> Probed:
            nonlocal left_s
            if left_s <= 0:
                raise BackendUnavailable(OVER.format(whole_s), kind="timeout")
            began = self._clock()
            sent = asyncio.create_task(self._send(records, left_s))
            self._sent = incarnation, sent
            try:
                await asyncio.wait({sent})
                if incarnation != self._member.incarnation:
                    raise BackendUnavailable("it was restarted", kind="lost")
                if sent.cancelled():  # by a library: nobody cancelled this task
                    raise BackendUnavailable("its probe was given up", kind="lost")
                return sent.result()
            finally:
                left_s -= self._clock() - began
                sent.cancel()
                await asyncio.wait({sent})
                if not sent.cancelled():
                    sent.exception()  # marks the exception as retrieved

        return send

    async def _found(self, probe: Awaitable[Examined]) -> Examined:
        """Returns the result of `probe`; turns any exception into a result."""
        try:
            return await probe
        except Unprovable as error:
            return Examined("refused", str(error), "unprovable")
        except BackendError as error:
            return Examined("unproven", str(error), "inconclusive", soon=True)
        except Exception as error:
            return self._defect(error)

    def _defect(self, error: Exception) -> Examined:
        """Handles a defect, most likely of Octet: it proves nothing about the backend."""
        _log.error("the proof of %s failed", self._member.name, exc_info=error)
        # Without the error's text, which may name a file of the gateway.
        reason = f"its probe failed: {type(error).__name__}"
        return Examined("unproven", reason, "defect", soon=True)

    async def _send(self, records: tuple[int, ...], timeout_s: float) -> Probed:
        member, proof, most = self._member, self.proof, self.config.concurrency
        if proof.admits or member.in_flight:
            most = max(most // 4, 1)
        probed = await self.exam.probe(
            member.backend, records, concurrency=most, timeout_s=timeout_s
        )
        proof.tokens += probed.tokens
        proof.seconds += probed.seconds
        proof.prompts += len(probed.responses)
        proof.notes = tuple(map(member.nameless, probed.notes))
        return probed

    async def _recheck(self, rounds: Rounds) -> None:
        """Probes a serving backend with a few prompts; with none until it has served enough."""
        member, proof = self._member, self.proof
        allowed = allowance(self.config.share, member.served_tokens, proof.tokens)
        records = rounds.next(allowed) if allowed > 0 else ()
        if not records:
            return
        incarnation, proof.seconds = member.incarnation, 0.0
        found = await self._found(rounds.check(records, self._sender()))
        if incarnation != member.incarnation:
            return
        # It could be judged at its admission, so a defect now is caused by its answers now.
        if found.state == "refused" or found.outcome == "defect":
            self._suspect(found)
            return await self.admit()
        if found.state == "unproven":
            return self._unclear(found)
        if found.state in PROVEN and proof.state == "admitted":
            return await self.admit()  # it returns log-probabilities by now
        if found.outcome == "as_expected":
            proof.verdict, proof.reason = found.verdict, member.nameless(found.reason)
            member.changed()
        self._again(self.config.every_s, found)

    def _again(self, after_s: float, found: Examined) -> None:
        self.proof.probed(found.outcome, found.verdict)
        self.proof.next_at = self._clock() + after_s * self._rng.uniform(1.0, 1.1)
        self._backoff.reset()

    def _suspect(self, found: Examined) -> None:
        """Ejects a serving backend whose answers look wrong; only a whole probe may refuse it."""
        self._suspected = True
        self.proof.probed("suspect", found.verdict)
        self._become("unproven", replace(found, reason=f"probing it again: {found.reason}"))

    def _conclude(self, found: Examined) -> None:
        if found.state == "unproven":
            return self._unclear(found)
        seed = self._rng.getrandbits(32)
        left_out = None if found.verdict is None else found.verdict.left_out
        self._rounds = Rounds(self.exam, self._member.backend, seed, found.responses, left_out)
        self._become(found.state, found)
        if found.state == "refused":
            self.proof.probed(found.outcome, found.verdict)
            self.proof.next_at = self._clock() + self._backoff.next(REFUSED_S)
        else:
            self._suspected = False
            self._again(self.config.every_s, found)

    def _unclear(self, found: Examined) -> None:
        """Handles a probe without a result: a serving backend goes on, any other waits."""
        proof, reason = self.proof, self._member.nameless(found.reason)
        proof.probed(found.outcome, found.verdict)
        after_s = self._backoff.next(UNCLEAR_S if found.soon else REFUSED_S)
        if proof.admits and not found.soon:  # it may be busy with its clients' requests
            after_s = max(after_s, self.config.every_s)
        proof.next_at = self._clock() + after_s
        if not proof.admits and proof.state != "refused":
            proof.reason, proof.verdict = f"no verdict yet: {reason}", found.verdict
        line = f"no verdict; probing it again later: {reason}"
        self._say(logging.WARNING, line, found.outcome, found.verdict)

    def _become(self, state: ProofState, found: Examined) -> None:
        member, proof = self._member, self.proof
        reason = member.nameless(found.reason)
        news = (state, reason) != (proof.state, proof.reason)
        served = proof.admits
        proof.state, proof.verdict, proof.reason = state, found.verdict, reason
        proof.cause, proof.settings = found.cause, found.settings
        differences = () if found.view is None else tuple(found.view.differences)
        if differences and differences != proof.differences:
            line = f"gives clients other defaults than its artifact: {'; '.join(differences)}"
            self._say(logging.WARNING, line, "differs", found.verdict)
        proof.differences = differences
        if served and not proof.admits and member.proof is proof:
            # Requests without a token yet go to other backends; answers that have begun continue.
            member.incarnation += 1
            self._incarnation = member.incarnation
        if member.proof is proof:
            if state == "refused":  # replaces an outdated reason
                member.last_error = f"refused: {reason}"
            elif proof.admits and not served:
                member.came_in_at = self._clock()
            member.changed()
        if news:
            level = logging.INFO if state == "proven" else logging.WARNING
            self._say(level, f"is {state}: {reason}", state, found.verdict)

    def _say(self, level: int, line: str, outcome: str, verdict: Verdict | None) -> None:
        member = self._member
        fields: dict[str, Any] = {"pool": member.pool, "backend": member.name, "outcome": outcome}
        fields |= {
            k: v
            for k, v in measured(verdict, self.proof.cause).items()
            if v is not None and k != "outcome"
        }
        fields |= {"artifact": self.proof.identity, "probe_tokens": self.proof.tokens}
        _log.log(level, "%s/%s %s", member.pool, member.name, line, extra={"fields": fields})


# Delay before the first try, and the longest before a later one:
UNCLEAR_S = (1.0, 60.0)  # if it did not answer, most likely because it is busy
REFUSED_S = (10.0, 600.0)  # if its answers are wrong or inconclusive: somebody may repair it
_SPREAD = 0.25  # jitter, as a fraction of the delay: gateways that start together drift apart


class Backoff:
    """A delay that doubles from one try to the next."""

    def __init__(self, rng: random.Random) -> None:
        self._random = rng.uniform
        self._tries = 0

    def reset(self) -> None:
        self._tries = 0

    def next(self, limits: tuple[float, float]) -> float:
        """Returns the seconds until the next try, within `limits` apart from the jitter."""
        first, most = limits
        wait_s = min(first * 2.0 ** min(self._tries, 30), most)
        self._tries += 1
        return wait_s * self._random(1 - _SPREAD, 1 + _SPREAD)


def allowance(share: float, served: int, spent: int) -> int:
    """Returns the tokens that the next probe may take: probes get at most `share` of all tokens.

    `served` counts clients' tokens; `spent` counts those of every probe so far, admissions
    included. After an expensive probe, later ones wait until enough has been served.
    """
    if share >= 1.0:
        return 2**31
    return int(share * served / (1.0 - share)) - spent
