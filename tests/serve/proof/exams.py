"""An exam without golden records: what a server answers, and what it is found to be, is said."""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field, replace

from octet.proof.causes import Cause
from octet.proof.divergence import Measure
from octet.proof.responses import Response
from octet.proof.verdict import LeftOut, Outcome, Range, Verdict
from serve.backends.base import Backend
from serve.config import BackendConfig
from serve.config.proof import Proof
from serve.proof.engine_report import Inspection
from serve.proof.exam import Exams
from serve.proof.probe import ClientView, Failure, Probed

__all__ = ["RECORD_TOKENS", "FakeExam", "FakeExams", "verdict"]

RECORD_TOKENS = 100  # that asking one record takes
_OUTCOMES: tuple[Outcome, ...] = ("as_expected", "better", "worse", "inconclusive")
_CAUSE = Cause("k_scale_dropped", "match weights without their k_scale", "load the k_scale")


def verdict(outcome: Outcome, kl: float = 0.02) -> Verdict:
    wrong = outcome in ("better", "worse")
    figures = Measure(kl, kl / 2, kl * 2, kl, kl, 0.9, None, 24, 190)
    reason = f"KL {kl} nats, 0.01 to 0.03 expected" + ("; dropped k_scale" if wrong else "")
    cause = _CAUSE if wrong else None
    return Verdict(outcome, figures, Range(0.02, 0.01, 0.03), None, cause, (), (), reason)


@dataclass
class FakeExam:
    """`says[name]` is what the answers of the backend of that name are; "as_expected" if nothing.

    A probe takes `seconds`, raises what is in `errors`, and has no answer of those in `busy`.
    """

    key: Hashable = "exam"
    label: str = "a fake exam"
    identity: str = "a" * 64
    says: dict[str, Outcome] = field(default_factory=dict)
    errors: dict[str, BaseException] = field(default_factory=dict)
    busy: set[str] = field(default_factory=set)
    found: dict[str, list[str]] = field(default_factory=dict)
    views: dict[str, ClientView] = field(default_factory=dict)
    alternatives: int = 20
    least: int = 0
    seconds: float = 0.5
    asked: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    at_once: list[int] = field(default_factory=list)
    judged: list[int] = field(default_factory=list)  # answers

    def parts(self, seed: int, context: int | None) -> list[tuple[int, ...]]:
        return [tuple(range(24)), tuple(range(24, 44)), tuple(range(44, 64))]

    def left_out(self, context: int | None, failed: Collection[int] = ()) -> LeftOut | None:
        return None if context is None else LeftOut(40, 64, context)

    def slicing(self, seed: int, context: int | None) -> Callable[[int], tuple[int, ...]]:
        return FakeSlices().next

    async def inspect(self, backend: Backend) -> Inspection:
        return Inspection(self.found.get(backend.name, []), {"engine": "fake"})

    async def probe(
        self, backend: Backend, records: Sequence[int], *, concurrency: int, timeout_s: float
    ) -> Probed:
        self.asked.append((backend.name, tuple(records)))
        self.at_once.append(concurrency)
        await asyncio.sleep(min(self.seconds, timeout_s))
        if error := self.errors.get(backend.name):
            raise error
        if backend.name in self.busy or self.seconds > timeout_s:
            return Probed([], [Failure(n, "busy", "no answer in time") for n in records])
        says = _OUTCOMES.index(self.says.get(backend.name, "as_expected"))
        answers = [Response(n, (says,), ({1: 0.0},)) for n in records]
        tokens = RECORD_TOKENS * len(records)
        return Probed(answers, [], tokens, self.seconds, self.alternatives, True)

    async def client_view(self, backend: Backend, *, timeout_s: float) -> ClientView:
        return self.views.get(backend.name, ClientView())

    async def judge(self, responses: Sequence[Response], looks: int) -> Verdict:
        """By the outcome that is not as expected, if three or more answers are of it."""
        self.judged.append(len(responses))
        says = Counter(_OUTCOMES[response.tokens[0]] for response in responses)
        wrong = [outcome for outcome in _OUTCOMES[1:] if says[outcome] >= 3]
        measured = verdict(wrong[0] if wrong else "as_expected")
        figures = replace(measured.measure, prompts=len(responses))
        return replace(measured, measure=figures)

    def asked_of(self, name: str) -> list[tuple[int, ...]]:
        return [records for backend, records in self.asked if backend == name]


class FakeSlices:
    def __init__(self) -> None:
        self._next = 0

    def next(self, allowance: int) -> tuple[int, ...]:
        count = min(allowance // RECORD_TOKENS, 24)
        start, self._next = self._next, self._next + count
        return tuple(n % 64 for n in range(start, start + count))


class FakeExams(Exams):
    """`exam` for every backend; None: no proof is wanted."""

    def __init__(self, exam: FakeExam | None, config: Proof | None = None) -> None:
        super().__init__(config or Proof())
        self.exam = exam

    async def find(self, entry: BackendConfig | None) -> FakeExam | None:
        return self.exam if self.config.enabled else None
