"""Probes of a backend that serves: a few prompts at a time, judged together with those before.

What looks wrong is for a whole probe to refuse. A probe that came to nothing for want of time, or
of a connection, says nothing; prompts that fail otherwise are a fault if they do so several times.
"""

from collections.abc import Awaitable, Callable, Sequence

from octet.proof.responses import Response
from octet.proof.verdict import Verdict
from serve.backends.base import Backend
from serve.members.proof_state import ProofState
from serve.proof.admission import WRONG, Examined
from serve.proof.exam import Exam
from serve.proof.result import Probed, Unprovable

__all__ = ["WINDOW", "Rounds"]

WINDOW = 24  # of the newest answers, those that are judged together
_BROKEN = ("failed", "refused", "tokenizer")  # not for want of time, nor of a connection
_PATIENCE = 3  # probes running that failed so at some prompt


class Rounds:
    """Of one life of a backend, from its whole probe on."""

    def __init__(self, exam: Exam, backend: Backend, seed: int, known: Sequence[Response]) -> None:
        """`known` is what it answered then."""
        self._exam = exam
        self._backend = backend
        self._known = {response.record: response for response in known}  # the oldest first
        self._broken = 0  # probes running
        self.next = exam.slicing(seed, backend.context_length).next

    async def look(
        self, records: tuple[int, ...], ask: Callable[[tuple[int, ...]], Awaitable[Probed]]
    ) -> Examined:
        """Refused: it has to be asked for everything. Raises what `ask` raises, and Unprovable."""
        if findings := await self._exam.findings(self._backend):
            return Examined("refused", "; ".join(findings), "refused")
        try:
            probed = await ask(records)
        except Unprovable as error:
            if error.kind != "context":
                raise
            return Examined("unproven", str(error), "inconclusive")  # another slice may fit
        said = "; ".join(probed.notes)
        broken = any(failure.kind in _BROKEN for failure in probed.failures)
        self._broken = self._broken + 1 if broken else 0
        if self._broken >= _PATIENCE:
            return Examined("refused", said, "inconclusive")
        if not probed.responses:
            return Examined("unproven", said, "inconclusive", soon=True)
        if not probed.alternatives:
            # What was known of it, it has told by them.
            silent: ProofState = "refused" if self._known else "admitted"
            return Examined(silent, "it returns no log-probabilities", "no_logprobs")
        verdict = await self._judge(probed.responses)
        state: ProofState = "refused" if verdict.outcome in WRONG else "proven"
        return Examined(state, verdict.reason, verdict.outcome, verdict)

    async def _judge(self, responses: Sequence[Response]) -> Verdict:
        """Wrong is who is so by the newest answers, or by the newest to each prompt of this life.

        The latter are more, and what is measured is measured of them.
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
