"""A whole probe: golden prompts in several interim checks, until the verdict is clear.

A backend passes only if every prompt it was sent is judged correct, except those longer than its
context. A prompt that failed is sent again in the next check: a server that answers some prompts
and fails at others may fail at the very ones that would have shown its fault.
"""

import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from octet.errors import OctetError
from octet.proof.causes import Cause
from octet.proof.responses import Response
from octet.proof.verdict import Verdict
from serve.backends.base import Backend
from serve.members.proof_state import ProofState, proven_by
from serve.proof.exam import Exam
from serve.proof.probe import ClientView, Probed, Unprovable

__all__ = ["OVER", "WRONG", "Examined", "examine", "silent"]

WRONG = ("better", "worse")  # outcomes

OVER = (  # seconds
    "its probe was over after {:g} s, and some golden prompts had no answer: if it is always this"
    " slow, raise proof.timeout_s"
)
_SILENT = (
    "it returns no log-probabilities, so its answers cannot be checked: make the server return them"
    " (vLLM: --max-logprobs 20), or set proof.without_logprobs: admit"
)
_REMEDY = (
    "serve the artifact that proof.golden names, as exported, or declare under proof what it serves"
)


@dataclass(frozen=True, slots=True)
class Examined:
    """Result for the backend; "unproven": no verdict, so it is to be probed again."""

    state: ProofState
    reason: str  # one line, for people
    outcome: str  # under which the probe is counted
    verdict: Verdict | None = None
    responses: tuple[Response, ...] = ()
    soon: bool = False  # whether a retry may help at once: not all prompts were answered
    cause: Cause | None = None  # if it does not come from the verdict
    view: ClientView | None = None  # what clients get by default; None: not examined
    settings: Mapping[str, str | int] = field(default_factory=dict)  # of the engine


async def examine(
    exam: Exam,
    backend: Backend,
    send: Callable[[tuple[int, ...]], Awaitable[Probed]],
    seed: int,
    without_logprobs: Literal["refuse", "admit"],
    *,
    every_prompt: bool = False,
    timeout_s: float = 60.0,
) -> Examined:
    """Runs a whole probe. Raises Unprovable, and what `send` raises.

    With `every_prompt`, all interim checks must be passed: a subset does not suffice for a backend
    that looks wrong after it passed one. `timeout_s` limits the requests that show what clients get
    by default.
    """
    parts = exam.parts(seed, backend.context_length)
    inspected = await exam.inspect(backend)
    if inspected.findings:
        return await _found(inspected.findings, exam, send, parts)
    if not parts:
        raise Unprovable.in_context(backend.name, backend.context_length)
    responses: list[Response] = []
    missing: list[int] = []
    too_long: set[int] = set()
    notes: list[str] = []
    verdict: Verdict | None = None
    for number, records in enumerate(parts, start=1):
        probed = await send((*records, *missing))
        if probed.responses and not probed.alternatives:
            return silent(without_logprobs)
        responses += probed.responses
        missing, notes = probed.missing, probed.notes
        too_long |= probed.too_long
        if not probed.responses:
            break
        left_out = exam.left_out(backend.context_length, too_long)
        verdict = (await exam.judge(responses, len(parts))).leaving_out(left_out)
        reason, known = verdict.reason, tuple(responses)
        if verdict.outcome in WRONG:
            return Examined("refused", reason, verdict.outcome, verdict, known)
        enough = number == len(parts) or not every_prompt
        enough &= len(responses) >= exam.least
        if verdict.outcome == "as_expected" and enough and not missing:
            view = await exam.client_view(backend, timeout_s=timeout_s)
            if view.tokenizer is not None:
                return Examined("refused", view.tokenizer, "unprovable", verdict, known, view=view)
            return Examined(
                proven_by(verdict),
                reason,
                verdict.outcome,
                verdict,
                known,
                view=view,
                settings=inspected.settings,
            )
    reason = "; ".join(notes) if missing or not responses else ""
    reason = reason or (verdict.reason if verdict else "it has returned no answer")
    if verdict is not None and verdict.outcome == "as_expected" and not missing:
        reason += f"; proof.power needs {exam.least} answers, and it returned {len(responses)}"
    return Examined("unproven", reason, "inconclusive", verdict, soon=bool(missing))


async def _found(
    findings: Sequence[str],
    exam: Exam,
    send: Callable[[tuple[int, ...]], Awaitable[Probed]],
    parts: Sequence[tuple[int, ...]],
) -> Examined:
    """Refuses a backend whose engine reports a mismatch; its answers may identify the fault."""
    reason = "; ".join(findings)
    verdict: Verdict | None = None
    with contextlib.suppress(OctetError):  # it is refused, whatever it answers
        probed = await send(parts[0] if parts else ())
        if probed.responses and probed.alternatives:
            verdict = await exam.judge(probed.responses, len(parts))
    if verdict is not None and verdict.outcome in WRONG:
        return Examined("refused", f"{reason}; {verdict.reason}", "refused", verdict)
    return Examined(
        "refused", f"{reason}: {_REMEDY}", "refused", cause=Cause("structure", reason, _REMEDY)
    )


def silent(without_logprobs: Literal["refuse", "admit"]) -> Examined:
    """Returns the result for a backend that returns no log-probabilities."""
    if without_logprobs == "admit":
        reason = "it returns no log-probabilities: it serves unproven, as configured"
        return Examined("admitted", reason, "no_logprobs")
    return Examined("refused", _SILENT, "no_logprobs")
