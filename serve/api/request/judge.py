"""Estimates the divergence of a pool from a reference pool, on copies of clients' requests.

The judged pool answers a copy of the prompt at temperature 1, and returns log q of each token that
it sampled. The reference pool prefills the same prompt and answer, and returns log p of the same
tokens. The expectation of the sum of log q - log p is the KL divergence of the two pools' answers
(chain rule), whatever temperature the client chose.

No client waits for a copy, sees its answer or pays for it. Only log-probabilities are kept.
"""

import asyncio
import logging
import math
import secrets
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from octet.errors import BackendError, OctetError, RequestError
from serve.admission.admission import Admission
from serve.api.operation import Call
from serve.api.schemas import PROMPT_FIELDS
from serve.api.text import TextOperation, plain_messages
from serve.backends.base import Backend
from serve.engine.request import Delta, Finished, GenerateRequest, PositionLogprobs
from serve.engine.tokenizer import beside
from serve.gateway.rollout import Rollouts
from serve.gateway.state import Gateway
from serve.members.member import Lease, Member
from serve.members.proof_state import PROVEN
from serve.proof.probe import NO_PENALTIES
from serve.routing.judgement import Judgement, Outcome
from serve.routing.policies import Ask
from serve.routing.pool import Pool

__all__ = ["judge_copy"]

_log = logging.getLogger(__name__)
# Samples from the model's own distribution, whatever its generation_config.json says.
_PLAIN_SAMPLING: dict[str, Any] = {**NO_PENALTIES, "top_k": -1, "min_p": 0.0}
# Tokenized by both pools if the prompt is token ids: tokenizers that agree on it count as the same.
_TEXT = "def naïve(x): return [x ** 2, 'Ω', 0x1F]  # 12345 größer, 中文"


class _NotJudged(Exception):
    """Raised for a copy that cannot be judged; `lasting` if no other copy could be, either."""

    def __init__(self, outcome: Outcome, message: str = "", *, lasting: bool = False) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.lasting = lasting


def judge_copy(gateway: Gateway, operation: TextOperation, call: Call) -> None:
    """Starts a copy of `call` for a judged pool of its route, if the call is drawn for one."""
    pool = call.route.judged()
    if pool is None or pool.judgement is None or gateway.draining:
        return
    judgement = pool.judgement
    prompt, _ = operation.cost(call.body, 0)
    tokens = 2 * (prompt + judgement.config.answer_tokens)
    reference = gateway.pools.get(judgement.config.reference)
    if reference is None or prompt > judgement.config.max_prompt_tokens:
        _count(gateway, pool, judgement, "unavailable" if reference is None else "too_long")
    elif not judgement.take(tokens):
        _count(gateway, pool, judgement, "limit")
    else:
        copy = _Copy(
            *(gateway.admission, gateway.rollouts, operation, call),
            *(pool, reference, judgement, tokens // 2),
        )
        judgement.in_flight += 1
        task = asyncio.create_task(_run(gateway, copy), name=f"judge of {pool.name}")
        gateway.background.add(task)
        task.add_done_callback(gateway.background.discard)


def _count(gateway: Gateway, pool: Pool, judgement: Judgement, outcome: Outcome) -> None:
    judgement.outcomes[outcome] += 1
    gateway.metrics.copies.labels(pool.name, outcome).inc()


async def _run(gateway: Gateway, copy: "_Copy") -> None:
    pool, judgement = copy.pool, copy.judgement
    outcome: Outcome = "cancelled"
    try:
        outcome = await _outcome(copy)
    finally:
        judgement.in_flight -= 1
        _count(gateway, pool, judgement, outcome)


async def _outcome(copy: "_Copy") -> Outcome:
    """Judges one copy, and returns the outcome. Raises nothing but CancelledError."""
    pool, judgement = copy.pool, copy.judgement
    try:
        async with asyncio.timeout(pool.config.timeouts.total_s):
            await copy.judge()
        return "judged"
    except _NotJudged as error:
        if error.lasting:
            if not judgement.problem:
                _log.warning("pool %s cannot be judged: %s", pool.name, error)
            judgement.failed(error.outcome, str(error))
        return error.outcome
    except TimeoutError:
        return "timeout"
    except OctetError as error:
        _log.info("judge of pool %s: %s", pool.name, error)
    except Exception:
        _log.exception("judge of pool %s", pool.name)
    return "failed"


@dataclass(frozen=True)
class _Copy:
    """One copy of a request, for both pools."""

    admission: Admission
    rollouts: Rollouts
    operation: TextOperation
    call: Call
    pool: Pool
    reference: Pool
    judgement: Judgement
    tokens: int  # estimated tokens of prompt and answer, in one pool

    async def judge(self) -> None:
        """Adds one answer to the judgement. Raises _NotJudged or OctetError if there is none."""
        judged, reference = self._member(self.pool), self._member(self.reference)
        if reference.proof is None or reference.proof.state not in PROVEN:
            raise _NotJudged("unproven")
        incarnations = judged.incarnation, reference.incarnation
        prompt = await self._prompt(judged.backend, reference.backend)
        most = self.judgement.config.answer_tokens
        for backend in (judged.backend, reference.backend):
            if backend.context_length is not None and len(prompt) + most >= backend.context_length:
                raise _NotJudged("too_long")
        drawn = await self._positions(judged, prompt, max_tokens=most)
        answer = [position.chosen.token_id for position in drawn][:most]
        if not answer or min(answer) < 0:
            raise _NotJudged("refused", f"{judged.name} does not name tokens by ids", lasting=True)
        scored = await self._positions(reference, (*prompt, *answer), max_tokens=1, echo=True)
        scored = scored[len(prompt) : len(prompt) + len(answer)]
        known = [position.chosen.token_id for position in scored]
        if known != answer or any(position.chosen.logprob is None for position in scored):
            message = f"{reference.name} returns no log-probabilities of a prompt's tokens"
            raise _NotJudged("refused", message, lasting=True)
        if incarnations != (judged.incarnation, reference.incarnation):
            raise _NotJudged("failed")
        self.judgement.saw(judged.name, judged.incarnation)
        self._add(drawn, scored)

    def _add(self, drawn: Sequence[PositionLogprobs], scored: Sequence[PositionLogprobs]) -> None:
        total, agreed = 0.0, 0
        for ours, theirs in zip(drawn, scored, strict=False):
            q, p = ours.chosen.logprob, theirs.chosen.logprob
            if p is None or math.isnan(p):
                raise _NotJudged("failed")
            # The divergence is infinite if q is not finite, or for a token with p = 0.
            if q is None or not math.isfinite(q) or math.isinf(p):
                total = math.inf
                break
            total += q - p
            agreed += bool(ours.top and theirs.top and _likeliest(ours) == _likeliest(theirs))
        judgement, before = self.judgement, self.judgement.ruling
        if judgement.add(total, len(scored), agreed):
            level = logging.WARNING if judgement.ruling == "exceeds" else logging.INFO
            line = "pool %s is judged: %s (%s before): %s"
            _log.log(level, line, self.pool.name, judgement.ruling, before, judgement.sentence())
            # A reload may have given the pool other backends, and with them a new judgement.
            if judgement.ruling == "exceeds" and judgement is self.pool.judgement:
                self.rollouts.exceeded(self.pool)

    def _member(self, pool: Pool) -> Member:
        """Chooses a backend that has nothing waiting. Raises _NotJudged if there is none."""
        gate = self.admission.gates.get(pool.name)
        member = pool.choose(Ask(self.tokens))
        if member is None:
            raise _NotJudged("unavailable")
        if (gate is not None and gate.queue) or (member.report and member.report.waiting):
            raise _NotJudged("busy")
        return member

    async def _prompt(self, judged: Backend, reference: Backend) -> tuple[int, ...]:
        """Returns the prompt's tokens. Raises _NotJudged if the pools tokenize differently."""
        body = self.call.body
        if self.operation.dialect == "chat":
            if any(self.call.data.get(name) for name in PROMPT_FIELDS):
                raise _NotJudged("unsupported")
            try:
                asked: Any = plain_messages(body.messages, judged.name)
            except RequestError:
                raise _NotJudged("unsupported") from None
        else:
            asked = body.prompt[0]
        text = asked if isinstance(asked, str | list) else _TEXT
        try:
            ours, theirs = await _tokens(judged, text), await _tokens(reference, text)
        except RequestError as error:
            raise _NotJudged("refused", f"tokenizing: {error}", lasting=True) from None
        if ours != theirs:
            message = f"{judged.name} and {reference.name} tokenize the same prompt differently"
            raise _NotJudged("tokenizer", message, lasting=True)
        return ours if text is asked else tuple(asked)

    async def _positions(
        self, member: Member, prompt: tuple[int, ...], *, max_tokens: int, echo: bool = False
    ) -> list[PositionLogprobs]:
        """Returns the log-probabilities of an answer at temperature 1; with `echo`, of the prompt.

        Raises _NotJudged if the backend refuses the request, and BackendError if it fails.
        """
        request = GenerateRequest(
            request_id=f"judge-{secrets.token_hex(12)}",
            model=member.backend.models[0],
            prompt=prompt,
            max_tokens=max_tokens,
            logprobs=1,
            echo=echo,
            extra=_PLAIN_SAMPLING if member.backend.accepts_extra else {},
        )
        lease = member.lease(self.tokens)
        found: list[PositionLogprobs] = []
        try:
            async with aclosing(member.backend.generate(request)) as events:
                async for event in events:
                    lease.progressed()
                    if isinstance(event, Delta):
                        found += event.logprobs or ()
                        if len(found) > len(prompt) + max_tokens:
                            line = f"{member.name}: more tokens than requested"
                            raise BackendError(line, kind="garbled")
                    elif isinstance(event, Finished):
                        _settle(lease, event, self.judgement)
            lease.succeeded()
            return found
        except BackendError as error:
            # A server may fail to return log-probabilities of prompts, yet serve clients well.
            if not echo or error.kind in ("refused", "lost", "dead"):
                lease.failed(error)
            raise
        except RequestError as error:
            raise _NotJudged("refused", f"{member.name}: {error}", lasting=True) from None
        finally:
            lease.release()


def _settle(lease: Lease, end: Finished, judgement: Judgement) -> None:
    lease.written = end.usage.completion_tokens
    lease.served = end.usage.prompt_tokens + lease.written
    judgement.tokens += lease.served


def _likeliest(position: PositionLogprobs) -> int:
    return position.top[0].token_id


async def _tokens(backend: Backend, asked: str | list[dict[str, str]]) -> tuple[int, ...]:
    """Returns the token ids of a text or a conversation, by the tokenizer of `backend`.

    Raises RequestError if it cannot tokenize it, BackendError if it fails.
    """
    text = isinstance(asked, str)
    if backend.tokenizer is not None:
        if text:
            return tuple(await beside(backend.tokenizer.encode, asked, size=len(asked)))
        prompt = await beside(backend.chat_prompt, asked, size=None)
        if not isinstance(prompt, str):
            return prompt
        encoded = backend.tokenizer.encode(prompt, add_special_tokens=False)
        return tuple(encoded)
    post = getattr(backend, "post", None)
    if post is None:
        raise RequestError(f"{backend.name} has no tokenizer")
    answer = await post("/tokenize", {"prompt" if text else "messages": asked})
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise RequestError(f"{backend.name} returns no tokens")
    return tuple(tokens)
