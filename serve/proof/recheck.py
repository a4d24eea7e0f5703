"""Probes of a backend that serves: a few prompts at a time, judged with the earlier answers.

A suspicious result does not refuse the backend; only a whole probe can. A probe without answers for
lack of time or of a connection proves nothing. Prompts that fail for other reasons are a fault if
that happens in several probes in a row.
"""

from collections.abc import Awaitable, Callable, Sequence

from octet.proof.responses import Response
from octet.proof.verdict import LeftOut, Verdict
from serve.backends.base import Backend
from serve.members.proof_state import ProofState, proven_by
from serve.proof.admission import WRONG, Examined
from serve.proof.exam import Exam
from serve.proof.probe import Probed, Unprovable

__all__ = ["WINDOW", "Rounds"]

WINDOW = 24  # newest answers that are judged together
_BROKEN = ("failed", "refused", "tokenizer")  # failures not due to time or connection
_PATIENCE = 3  # probes in a row with such a failure


class Rounds:
    """The repeated probes of one incarnation of a backend, after its whole probe."""

    def __init__(
        self,
        exam: Exam,
        backend: Backend,
        seed: int,
        known: Sequence[Response],
        left_out: LeftOut | None = None,
    ) -> None:
        """`known` holds the answers of the whole probe, which left some prompts out."""
        self._exam = exam
        self._backend = backend
        self._known = {response.record: response for response in known}  # the oldest first
        self._left_out = left_out
        self._broken = 0  # probes in a row with a failure in `_BROKEN`
        self.next = exam.slicing(seed, backend.context_length)

    async def check(
        self, records: tuple[int, ...], send: Callable[[tuple[int, ...]], Awaitable[Probed]]
    ) -> Examined:
        """Runs one probe with `records`. A result of "refused" calls for a whole probe.

        Raises what `send` raises, and Unprovable.
        """
        inspected = await self._exam.inspect(self._backend)
        if inspected.findings:
            return Examined("refused", "; ".join(inspected.findings), "refused")
        try:
            probed = await send(records)
        except Unprovable as error:
            if error.kind != "context":
                raise
            return Examined("unproven", str(error), "inconclusive")  # another slice may fit
        notes = "; ".join(probed.notes)
        broken = any(failure.kind in _BROKEN for failure in probed.failures)
        self._broken = self._broken + 1 if broken else 0
        if self._broken >= _PATIENCE:
            return Examined("refused", notes, "inconclusive")
        if not probed.responses:
            return Examined("unproven", notes, "inconclusive", soon=broken)
        if not probed.alternatives:
            # If it has earlier answers, it returned log-probabilities then.
            silent: ProofState = "refused" if self._known else "admitted"
            return Examined(silent, "it returns no log-probabilities", "no_logprobs")
        verdict = (await self._judge(probed.responses)).leaving_out(self._left_out)
        state = "refused" if verdict.outcome in WRONG else proven_by(verdict)
        return Examined(state, verdict.reason, verdict.outcome, verdict)

    async def _judge(self, responses: Sequence[Response]) -> Verdict:
        """Judges the newest `WINDOW` answers, and the newest to each prompt of this incarnation.

        The backend is wrong if either verdict says so. The second set is larger, so the figures
        come from it, unless its verdict is inconclusive.
        """
        for response in responses:
            self._known.pop(response.record, None)
            self._known[response.record] = response
        newest = list(self._known.values())
        verdict = await self._exam.judge(newest[-WINDOW:], 2)
        if len(newest) <= WINDOW or verdict.outcome in WRONG:
            return verdict
        whole = await self._exam.judge(newest, 2)
        return verdict if whole.outcome == "inconclusive" else whole
