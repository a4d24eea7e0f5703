"""Sends golden prompts to a backend, decodes greedily, and collects the top log-probabilities.

Prompts are sent as text: a backend that turns one into other tokens has another tokenizer. If a
backend accepts extra fields, a fresh `cache_salt` keeps its prefix cache from answering in place of
its kernels, and penalties that its model's own settings may add are off.
"""

import asyncio
import math
import re
import secrets
import statistics
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from octet.artifacts.golden import POSITIONS, GoldenSet
from octet.errors import BackendError, OctetError, RequestError
from octet.proof.responses import Response
from serve.backends.base import Backend
from serve.engine.request import Delta, Finished, GenerateRequest, PositionLogprobs
from serve.engine.tokenizer import Tokenizer
from serve.proof.plan import fits
from serve.proof.tokens import UNKNOWN, TokenNames

__all__ = [
    "ALTERNATIVES",
    "LADDER",
    "NO_PENALTIES",
    "ClientView",
    "Failure",
    "FailureKind",
    "Probed",
    "Unprovable",
    "probe",
]

# vLLM takes each of these that a request leaves out from its model's generation_config.json.
NO_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
ALTERNATIVES = 20  # log-probabilities requested per position: as many as the reference has

# Why a record has no answer:
#   busy       no answer in time, or the server accepts no more now: worth a retry
#   gone       it cannot be reached, or its connection ended
#   failed     it reported a failure, or its answer cannot be parsed
#   context    the prompt is longer than the context it was started with
#   tokenizer  it tokenizes the prompt differently, or returns tokens that its vocabulary lacks
#   refused    it refuses the request; the failure's text is its own
FailureKind = Literal["busy", "gone", "failed", "context", "tokenizer", "refused"]


class Unprovable(OctetError):
    """Raised for a backend that golden records can never judge, however often it is probed."""

    def __init__(self, message: str, kind: FailureKind) -> None:
        super().__init__(message)
        self.kind = kind

    @classmethod
    def in_context(cls, backend: str, tokens: int | None) -> Self:
        """Makes the error for a context of `tokens` tokens, into which no prompt fits."""
        line = f"was started for a context of {tokens} tokens, shorter than every golden prompt"
        return cls(f"{backend}: {line}", "context")


@dataclass(frozen=True, slots=True)
class Failure:
    """A record without an answer; `text` is one line."""

    record: int
    kind: FailureKind
    text: str


@dataclass
class Probed:
    """Result of a probe. Each record is in `responses` or in `failures`."""

    responses: list[Response] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    tokens: int = 0  # prompts and answers, as the backend counted; prompts alone for failures
    seconds: float = 0.0
    alternatives: int = 0  # log-probabilities per position; 0: it returns none
    salted: bool = False  # whether its prefix cache was bypassed

    @property
    def state(self) -> Literal["answered", "busy", "gone", "failed"]:
        """State of the backend: `answered` if there is anything to judge; `busy`: retry later."""
        kinds = {failure.kind for failure in self.failures}
        if self.responses or not kinds:
            return "answered"
        return "busy" if "busy" in kinds else "gone" if "gone" in kinds else "failed"

    @property
    def too_long(self) -> set[int]:
        """Returns the records that do not fit into its context."""
        return {failure.record for failure in self.failures if failure.kind == "context"}

    @property
    def missing(self) -> list[int]:
        """Returns the records without an answer that may have one later."""
        return [failure.record for failure in self.failures if failure.kind != "context"]

    @property
    def notes(self) -> list[str]:
        """Remarks that must accompany a verdict, one line each."""
        found = []
        if self.responses and not self.alternatives:
            found.append("it returns no log-probabilities: nothing could be compared")
        elif self.responses and self.alternatives < ALTERNATIVES:
            found.append(
                f"it returns {self.alternatives} log-probabilities of a token, not {ALTERNATIVES}:"
                " the verdict is as certain, but misses changes of less likely tokens alone, and"
                f" the stated power is that of {ALTERNATIVES}"
            )
        sent = len(self.responses) + len(self.failures)
        for kind, outcome in _OUTCOMES.items():
            some = [failure for failure in self.failures if failure.kind == kind]
            if some:
                found.append(f"{len(some)} of {sent} golden prompts {outcome}: {some[0].text}")
        return found


@dataclass
class ClientView:
    """The differences between what clients get and the artifact."""

    tokenizer: str | None = None  # how its tokenizer differs: prompts become other tokens
    differences: list[str] = field(default_factory=list)  # cause and remedy, a line each
    unchecked: list[str] = field(default_factory=list)
    tokens: int = 0  # prompts and answers


_OUTCOMES: dict[FailureKind, str] = {
    "context": "are longer than its context and left out",
    "tokenizer": "became other tokens and are left out",
    "busy": "were not answered in time",
    "gone": "were lost",
    "failed": "failed",
    "refused": "were refused",
}


# Numbers of log-probabilities, tried in turn if a server refuses more; OpenAI's own limit is 5.
LADDER: tuple[int | None, ...] = (ALTERNATIVES, 5, 1, None)
_TOO_LONG = re.compile(
    r"maximum (context|model) length|context_length_exceeded|longer than the m|context of \d"
)
# Python's error for NaN and infinities in an answer: a server's JSON encoder raises it.
_NO_JSON = re.compile(r"Out of range float values are not JSON compliant")


async def probe(
    backend: Backend,
    golden: GoldenSet,
    records: Sequence[int],
    *,
    concurrency: int = 8,
    timeout_s: float = 60.0,
    tokenizer: Tokenizer | None = None,
    vocab_size: int | None = None,
    advance: Callable[[], None] = lambda: None,
) -> Probed:
    """Sends `records` of `golden`, `concurrency` at once, for `timeout_s` seconds altogether.

    `tokenizer` is the one beside the golden records: needed if a backend names tokens by their
    text. `vocab_size` is the model's. `advance` is called after each record. Raises Unprovable if
    a retry cannot help.
    """
    sender = _Sender(backend, golden, TokenNames(tokenizer), vocab_size)
    started = time.perf_counter()
    free = asyncio.Semaphore(concurrency)

    async def one(record: int) -> Response | Failure:
        async with free:
            found = await sender.record(record)
        advance()
        return found

    tasks = {asyncio.create_task(one(record)): record for record in records}
    try:
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
        late = [task for task in tasks if not task.done()]
        failures = await _late(backend, [tasks[task] for task in late], timeout_s)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    answers = [task.result() for task in tasks if task not in late]
    probed = Probed(
        [answer for answer in answers if isinstance(answer, Response)],
        [answer for answer in answers if isinstance(answer, Failure)] + failures,
        tokens=sender.tokens,
        seconds=time.perf_counter() - started,
        # A backend that returns some for one answer supports them; the judgement handles answers
        # without any.
        alternatives=statistics.median_low([n for n in sender.alternatives if n] or [0]),
        salted=bool(sender.extra),
    )
    _require_provable(backend, probed)
    return probed


class _Sender:
    """Sends the records of one probe, and remembers which fields the backend accepts."""

    def __init__(
        self, backend: Backend, golden: GoldenSet, names: TokenNames, vocab_size: int | None
    ) -> None:
        self._backend = backend
        self._golden = golden
        self._names = names
        self._vocab_size = vocab_size
        self._logprobs: int | None = ALTERNATIVES
        self.extra: dict[str, Any] = {}
        if backend.accepts_extra:
            self.extra = {"cache_salt": uuid.uuid4().hex, **NO_PENALTIES}
        self.tokens = 0
        self.alternatives: list[int] = []

    async def record(self, index: int) -> Response | Failure:
        prompt_tokens = len(self._golden.records[index].prompt_token_ids)
        context = self._backend.context_length
        if not fits(prompt_tokens, context):
            text = f"one has {prompt_tokens} tokens, it was started for {context}"
            return Failure(index, "context", text)
        while True:
            request = self._request(index, context)
            self.tokens += prompt_tokens
            try:
                deltas, end = await self._answer(request)
            except (BackendError, RequestError) as error:
                if _NO_JSON.search(str(error)):
                    return self._not_a_number(index)
                if isinstance(error, BackendError):
                    return Failure(index, _KINDS.get(error.kind, "gone"), str(error))
                self.tokens -= prompt_tokens
                if self._drop_refused_field(request, error):
                    continue
                too_long = _TOO_LONG.search(f"{error.code} {error}")
                return Failure(index, "context" if too_long else "refused", str(error))
            self.tokens += end.usage.prompt_tokens - prompt_tokens + end.usage.completion_tokens
            return self._read(index, deltas, end)

    def _request(self, index: int, context: int | None) -> GenerateRequest:
        record = self._golden.records[index]
        most = POSITIONS if context is None else context - len(record.prompt_token_ids)
        return GenerateRequest(
            request_id=secrets.token_hex(16),  # as the gateway names those of clients
            model=self._backend.models[0],
            prompt=record.prompt,
            max_tokens=min(POSITIONS, most),
            temperature=0.0,
            logprobs=self._logprobs,
            extra=self.extra,
        )

    async def _answer(self, request: GenerateRequest) -> tuple[list[Delta], Finished]:
        deltas: list[Delta] = []
        async with aclosing(self._backend.generate(request)) as events:
            async for event in events:
                if isinstance(event, Finished):
                    return deltas, event
                deltas.append(event)
        raise BackendError(
            f"{self._backend.name}: its answer ended without a finish reason", kind="garbled"
        )

    def _drop_refused_field(self, request: GenerateRequest, error: RequestError) -> bool:
        """Drops what the server refused, for all later requests; returns whether to retry."""
        refusal = f"{error.param} {error}"
        if request.extra and any(name in refusal for name in request.extra):
            self.extra = {}
            return True
        if "logprobs" not in refusal or request.logprobs is None:
            return False
        if request.logprobs == self._logprobs:  # no other request has lowered it yet
            unsupported = error.code == "unsupported_field"
            self._logprobs = None if unsupported else LADDER[LADDER.index(self._logprobs) + 1]
        return True

    def _read(self, index: int, deltas: list[Delta], end: Finished) -> Response | Failure:
        record = self._golden.records[index]
        ours, theirs = len(record.prompt_token_ids), end.usage.prompt_tokens
        if theirs and theirs != ours:
            text = f"it encodes a prompt of {ours} tokens as {theirs}"
            return Failure(index, "tokenizer", text)
        positions = [position for delta in deltas for position in delta.logprobs or ()]
        if wrong := self._unknown_token(positions):
            return Failure(index, "tokenizer", wrong)
        positions = positions[:POSITIONS]
        tokens = tuple(token for delta in deltas for token in delta.token_ids)
        if not tokens and positions:
            tokens = tuple(self._names.id_of(position.chosen) for position in positions)
        if not tokens:
            text = "".join(delta.text for delta in deltas)
            tokens = self._names.read(text, record.continuation_token_ids, POSITIONS)
        known = [set(top.token_ids) for top in record.tops]
        known += [set()] * (len(positions) - len(known))
        if _without_numbers(positions):
            return self._not_a_number(index)
        tops = tuple(map(self._names.top, positions, known))
        self.alternatives += [len(position.top) for position in positions]
        return Response(record=index, tokens=tokens[:POSITIONS], tops=tops)

    def _not_a_number(self, index: int) -> Response:
        """Returns an answer of NaN, which JSON lacks: the verdict then names NaN as the cause."""
        self.alternatives.append(ALTERNATIVES)
        return Response(record=index, tokens=(UNKNOWN,), tops=({UNKNOWN: math.nan},))

    def _unknown_token(self, positions: Sequence[PositionLogprobs]) -> str | None:
        for position in positions:
            for token in (position.chosen, *position.top):
                if self._vocab_size is not None and token.token_id >= self._vocab_size:
                    return f"it returns token {token.token_id}, and {self._vocab_size} exist"
            if position.chosen.token_id < 0 and self._names.is_foreign(position.chosen):
                text = repr(position.chosen.text)
                return f"it returns a token {text}, which is not in the artifact's vocabulary"
        return None


def _without_numbers(positions: Sequence[PositionLogprobs]) -> bool:
    """Returns whether log-probabilities are null, which some servers send in place of NaN.

    A server that supports none sends no position. One that leaves out some sends others.
    """
    if any(token.logprob is None for position in positions for token in position.top):
        return True
    missing = [p.chosen.logprob is None and not p.top for p in positions]
    return bool(missing) and all(missing)


_KINDS: dict[str, FailureKind] = {
    "timeout": "busy",
    "overloaded": "busy",
    "failed": "failed",
    "garbled": "failed",
}


async def _late(backend: Backend, records: Sequence[int], timeout_s: float) -> list[Failure]:
    """Returns the failures of records without an answer in time: busy if the server is ready.

    Otherwise the server is gone.
    """
    if not records:
        return []
    kind: FailureKind = "busy"
    text = f"no answer in {timeout_s:g} s, though it is ready"
    if not await backend.ready():
        kind, text = (
            "gone",
            f"no answer in {timeout_s:g} s, and it does not report that it is ready",
        )
    return [Failure(record, kind, text) for record in records]


def _require_provable(backend: Backend, probed: Probed) -> None:
    """Raises Unprovable if there is nothing to judge, and never will be."""
    kinds = [failure.kind for failure in probed.failures]
    for kind, line in _UNPROVABLE.items():
        # With another tokenizer some prompts may happen to have the same length.
        enough = 2 * kinds.count(kind) > len(probed.responses) if kind == "tokenizer" else False
        if enough or (kinds and kinds.count(kind) == len(kinds) and not probed.responses):
            first = next(failure for failure in probed.failures if failure.kind == kind)
            raise Unprovable(f"{backend.name}: {line}: {first.text}", kind)
    silent = all(not any(r.tops) and UNKNOWN in (*r.tokens, UNKNOWN)[:1] for r in probed.responses)
    if probed.responses and silent:
        raise Unprovable(
            f"{backend.name}: returns tokens as text only, and the golden records have no tokenizer"
            " to identify them",
            "tokenizer",
        )


_UNPROVABLE: dict[FailureKind, str] = {
    "tokenizer": "has another tokenizer than the golden records, which use tokenizer.json (the"
    " calibration warns if transformers makes another one of it)",
    "context": "was started for a context shorter than every golden prompt that was sent",
    "refused": "refuses the golden prompts",
}
