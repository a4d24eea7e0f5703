"""The operations that generate text: completions and chats.

A relaying backend gets the request as it is. From any other backend come tokens: the events of each
choice are merged and rendered here. `n` choices are n requests to the backend. Choice j of a
request with a seed gets `seed + j`: the first equals the answer to `n: 1`, and each can be
reproduced alone.
"""

import asyncio
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel

from octet.errors import RequestError, UnsupportedField
from serve.admission.admission import prompt_tokens
from serve.api.operation import DONE, EVENT_STREAM, JSON, Answer, Call, Tally, too_long
from serve.api.relay import open_relay
from serve.api.schemas import PROMPT_FIELDS, ChatRequest, CompletionRequest
from serve.api.unsupported import elsewhere, refuse_unsupported
from serve.backends.base import Backend, relays
from serve.config.gateway import MAX_ANSWER
from serve.engine.request import (
    Delta,
    Event,
    Finished,
    GenerateRequest,
    PositionLogprobs,
    TokenLogprob,
)
from serve.engine.tokenizer import beside

__all__ = [
    "Chats",
    "Completions",
    "TextOperation",
    "open_generate",
    "plain_messages",
    "requests_of",
]

LOWEST_LOGPROB = -9999.0  # JSON has no -Infinity; vLLM's stand-in for a probability of zero
TOKEN_BYTES = 40  # of a log-probability as JSON, at least
PENDING_EVENTS = 64  # per answer; beyond it, the choices wait for a slow client
Prompts: TypeAlias = Sequence[str | tuple[int, ...]]


class TextOperation(ABC):
    """An `Operation`. Writes its choices; the envelope around them is the same for both."""

    name: str
    path: str
    runs_model = True
    schema: type[BaseModel]
    dialect: Literal["completion", "chat"]
    id_prefix: str
    object: str
    chunk_object: str

    @abstractmethod
    def cost(self, body: Any, unlimited: int) -> tuple[int, int]:
        """See `Operation`."""

    @abstractmethod
    async def prompts(self, body: Any, backend: Backend) -> Prompts:
        """Returns the prompts of a request to `backend`. Raises RequestError if it refuses them."""

    @abstractmethod
    def choice(
        self, index: int, text: str, positions: Sequence[PositionLogprobs] | None, end: Finished
    ) -> dict[str, Any]:
        """Returns a whole choice; `positions` is None if no log-probabilities were requested."""

    @abstractmethod
    def opening(self, index: int) -> dict[str, Any] | None:
        """Returns the choice of the chunk before the first event, or None for no such chunk."""

    @abstractmethod
    def delta(self, index: int, delta: Delta) -> dict[str, Any]:
        """Returns the choice of a chunk."""

    @abstractmethod
    def end(self, index: int, end: Finished) -> dict[str, Any]:
        """Returns the choice of the last chunk of `index`."""

    async def open(self, backend: Backend, call: Call) -> Answer:
        if relays(backend):
            return await open_relay(backend, call)
        body: CompletionRequest | ChatRequest = call.body
        if extra := body.model_extra:
            refuse_unsupported(extra, type(body).model_fields, self.dialect, backend.name)
        prompts = await self.prompts(body, backend)
        requests = requests_of(body, prompts, call.id, call.headers)
        return await open_generate(backend, self, body, requests, call.max_answer_bytes)


class Completions(TextOperation):
    """POST /v1/completions."""

    name = "text_completion"
    path = "/v1/completions"
    schema = CompletionRequest
    dialect = "completion"
    id_prefix = "cmpl"
    object = chunk_object = "text_completion"

    def cost(self, body: CompletionRequest, unlimited: int) -> tuple[int, int]:
        choices = len(body.prompt) * (body.n or 1)
        return prompt_tokens(body.prompt), choices * body.answer_limit

    async def prompts(self, body: CompletionRequest, backend: Backend) -> Prompts:
        prompts: Prompts = body.prompt
        return prompts

    def choice(
        self,
        index: int,
        text: str,
        positions: Sequence[PositionLogprobs] | None,
        end: Finished | None,
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": None if positions is None else _completion_logprobs(positions),
            "finish_reason": end.reason if end else None,
            "stop_reason": end.stop_reason if end else None,  # vLLM's addition
        }

    def opening(self, index: int) -> None:
        return None

    def delta(self, index: int, delta: Delta) -> dict[str, Any]:
        return self.choice(index, delta.text, delta.logprobs, None)

    def end(self, index: int, end: Finished) -> dict[str, Any]:
        return self.choice(index, "", None, end)


class Chats(TextOperation):
    """POST /v1/chat/completions."""

    name = "chat"
    path = "/v1/chat/completions"
    schema = ChatRequest
    dialect = "chat"
    id_prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def cost(self, body: ChatRequest, unlimited: int) -> tuple[int, int]:
        answer = body.answer_limit or unlimited
        more = body.model_extra or {}
        beside = {name: more[name] for name in PROMPT_FIELDS if more.get(name)}
        told = [*body.messages, beside] if beside else body.messages
        return prompt_tokens(told), (body.n or 1) * answer

    async def prompts(self, body: ChatRequest, backend: Backend) -> Prompts:
        messages = plain_messages(body.messages, backend.name)
        # A template is a program: how long it takes does not depend on the messages alone.
        return [await beside(backend.chat_prompt, messages, size=None)]

    def choice(
        self, index: int, text: str, positions: Sequence[PositionLogprobs] | None, end: Finished
    ) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": None if positions is None else _chat_logprobs(positions),
            "finish_reason": end.reason,
            "stop_reason": end.stop_reason,  # vLLM's addition
        }

    def opening(self, index: int) -> dict[str, Any]:
        return _chunk(index, {"role": "assistant", "content": ""})

    def delta(self, index: int, delta: Delta) -> dict[str, Any]:
        return _chunk(index, {"content": delta.text}, delta.logprobs)

    def end(self, index: int, end: Finished) -> dict[str, Any]:
        choice = _chunk(index, {})
        return choice | {"finish_reason": end.reason, "stop_reason": end.stop_reason}


def requests_of(
    body: CompletionRequest | ChatRequest,
    prompts: Sequence[str | tuple[int, ...]],
    request_id: str,
    headers: Mapping[str, str] | None = None,
) -> list[GenerateRequest]:
    """Builds one request per choice, prompt by prompt; each carries `headers`."""
    n, sampling = body.n or 1, body.sampling()
    return [
        GenerateRequest(
            request_id=f"{request_id}-{index}",
            model=body.model,
            prompt=prompts[index // n],
            max_tokens=body.answer_limit,
            seed=None if body.seed is None else (body.seed + index % n) % 2**64,
            logprobs=body.alternatives,
            echo=bool(getattr(body, "echo", None)),
            headers=headers or {},
            **sampling,
        )
        for index in range(len(prompts) * n)
    ]


async def open_generate(
    backend: Backend,
    operation: TextOperation,
    body: CompletionRequest | ChatRequest,
    requests: Sequence[GenerateRequest],
    max_bytes: int = MAX_ANSWER,
) -> Answer:
    """Starts every choice, and waits for the first event, or for all of them if not streamed.

    Raises the error with which the backend refuses the request, and RequestError for an answer that
    is not streamed and has more than `max_bytes`.
    """
    tally = Tally()
    envelope = {
        "id": f"{operation.id_prefix}-{uuid.uuid4().hex}",
        "object": operation.chunk_object if body.stream else operation.object,
        "created": int(time.time()),
        "model": body.model,
    }
    streams = [backend.generate(request) for request in requests]
    if body.stop and body.alternatives is not None:
        streams = [_in_step(stream) for stream in streams]
    if body.return_tokens_as_token_ids:
        streams = [_named_by_id(stream) for stream in streams]
    events = _merge(streams)
    if not body.stream:
        events = _limited(events, backend.name, max_bytes)
    per_prompt = body.n or 1
    if not body.stream:
        content = await _whole(events, operation, envelope, len(requests), per_prompt, tally)
        return Answer(200, {"content-type": JSON}, content, tally=tally)
    chunks = _chunks(events, operation, envelope, body.include_usage, per_prompt, tally)
    try:
        first = await anext(chunks)
    except BaseException:
        await chunks.aclose()
        raise
    return Answer(200, {"content-type": EVENT_STREAM}, first, chunks, tally)


async def _whole(
    events: AsyncGenerator[tuple[int, Event], None],
    operation: TextOperation,
    envelope: dict[str, Any],
    count: int,
    per_prompt: int,
    tally: Tally,
) -> bytes:
    deltas: list[list[Delta]] = [[] for _ in range(count)]
    ends: dict[int, Finished] = {}
    async with aclosing(events):
        async for index, event in events:
            if isinstance(event, Delta):
                deltas[index].append(event)
            else:
                ends[index] = event
                _add(tally, event, counts_prompt=index % per_prompt == 0)
    choices = [_choice(operation, i, deltas[i], ends[i]) for i in range(count)]
    return _dumps(envelope | {"choices": choices, "usage": _usage(tally)})


async def _limited(
    events: AsyncGenerator[tuple[int, Event], None], backend: str, max_bytes: int
) -> AsyncGenerator[tuple[int, Event], None]:
    """Yields the same events. Raises RequestError once they make an answer over `max_bytes`."""
    size = 0
    async with aclosing(events):
        async for index, event in events:
            if isinstance(event, Delta):
                tokens = sum(1 + len(position.top) for position in event.logprobs or ())
                size += len(event.text) + TOKEN_BYTES * tokens
                if size > max_bytes:
                    raise too_long(backend, max_bytes)
            yield index, event


def _choice(
    operation: TextOperation, index: int, deltas: Sequence[Delta], end: Finished
) -> dict[str, Any]:
    requested = any(delta.logprobs is not None for delta in deltas)
    positions = [p for delta in deltas for p in delta.logprobs or ()] if requested else None
    return operation.choice(index, "".join(delta.text for delta in deltas), positions, end)


async def _chunks(
    events: AsyncGenerator[tuple[int, Event], None],
    operation: TextOperation,
    envelope: dict[str, Any],
    include_usage: bool,
    per_prompt: int,
    tally: Tally,
) -> AsyncGenerator[bytes, None]:
    # The envelope is written once; each chunk adds its one choice to it.
    head = b"data: " + _dumps(envelope)[:-1] + b',"choices":['
    tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
    opened: set[int] = set()
    async with aclosing(events):
        async for index, event in events:
            piece = b""
            if index not in opened:
                opened.add(index)
                opening = operation.opening(index)
                piece = head + _dumps(opening) + tail if opening is not None else b""
            if isinstance(event, Finished):
                _add(tally, event, counts_prompt=index % per_prompt == 0)
                piece += head + _dumps(operation.end(index, event)) + tail
            elif event.text or event.logprobs:
                piece += head + _dumps(operation.delta(index, event)) + tail
            if piece:
                yield piece
    usage = b""
    if include_usage:
        usage = head + b'],"usage":' + _dumps(_usage(tally)) + b"}\n\n"
    yield usage + DONE


async def _in_step(stream: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
    """Yields the same events, but holds each log-probability back until its token's text is sent.

    The tokens of a stop string have no text in the answer, so their log-probabilities are dropped.
    """
    shown = 0  # characters
    held: list[PositionLogprobs] = []
    async with aclosing(stream) as events:
        async for event in events:
            if isinstance(event, Delta):
                shown += len(event.text)
                held += event.logprobs or ()
                out = [p for p in held if p.text_offset < shown]
                del held[: len(out)]  # offsets never decrease
                yield replace(event, logprobs=tuple(out))
            else:
                if held and not isinstance(event.stop_reason, str):
                    yield Delta("", (), tuple(held))
                yield event


async def _named_by_id(stream: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
    """Yields the same events, with tokens in log-probabilities named `token_id:<id>`, as in vLLM.

    A text does not identify a token: several tokens have the same text, or are half a character.
    """
    async with aclosing(stream) as events:
        async for event in events:
            if isinstance(event, Delta) and event.logprobs:
                event = replace(event, logprobs=tuple(map(_position_by_id, event.logprobs)))
            yield event


def _position_by_id(position: PositionLogprobs) -> PositionLogprobs:
    def named(token: TokenLogprob) -> TokenLogprob:
        name = f"token_id:{token.token_id}"
        return replace(token, text=name, bytes=name.encode())

    top = tuple(map(named, position.top))
    return replace(position, chosen=named(position.chosen), top=top)


async def _merge(
    streams: Sequence[AsyncGenerator[Event, None]],
) -> AsyncGenerator[tuple[int, Event], None]:
    """Yields the events of all streams as they come, with the stream's index.

    The first failure ends all streams.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for event in stream:
                yield 0, event
        return
    queue: asyncio.Queue[tuple[int, Event | Exception]] = asyncio.Queue(PENDING_EVENTS)

    async def pump(index: int, stream: AsyncGenerator[Event, None]) -> None:
        try:
            async with aclosing(stream):
                async for event in stream:
                    await queue.put((index, event))
        except Exception as error:
            await queue.put((index, error))

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            running -= isinstance(item, Finished)
            yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _add(tally: Tally, end: Finished, *, counts_prompt: bool) -> None:
    """Adds one choice to the tally. A prompt counts once, however many choices it gets."""
    prompt = end.usage.prompt_tokens if counts_prompt else 0
    tally.prompt_tokens = (tally.prompt_tokens or 0) + prompt
    tally.completion_tokens = (tally.completion_tokens or 0) + end.usage.completion_tokens


def _usage(tally: Tally) -> dict[str, int]:
    prompt, completion = tally.prompt_tokens or 0, tally.completion_tokens or 0
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _dumps(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _completion_logprobs(positions: Sequence[PositionLogprobs]) -> dict[str, Any]:
    """Returns parallel lists over the tokens. The first token of an echoed prompt has nulls."""
    return {
        "tokens": [_name(p.chosen) for p in positions],
        "token_logprobs": [_finite(p.chosen.logprob) for p in positions],
        "top_logprobs": [_top(p) for p in positions],
        "text_offset": [p.text_offset for p in positions],
    }


def _top(position: PositionLogprobs) -> dict[str, float | None] | None:
    """Returns the most likely tokens, and the chosen one if it is not among them."""
    if position.chosen.logprob is None:
        return None
    return {_name(token): _finite(token.logprob) for token in (*position.top, position.chosen)}


def _name(token: TokenLogprob) -> str:
    """Returns the token's text, or its bytes in OpenAI's notation if they are not whole UTF-8.

    Tokens are the keys of `top_logprobs`. Written as U+FFFD, all such tokens would share one key.
    """
    if token.bytes and token.text != token.bytes.decode(errors="surrogateescape"):
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.bytes)
    return token.text


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LOWEST_LOGPROB)


_PLAIN = ("role", "content", "name")  # fields of a message that chat templates take


def plain_messages(messages: Sequence[Mapping[str, Any]], backend: str) -> list[dict[str, str]]:
    """Returns messages as chat templates take them: a role, a text and optionally a name.

    A list of text parts becomes one text. Raises RequestError for content that is not text, and
    for fields that no template would see. A null value or an empty list is dropped, not refused.
    """
    return [_plain(message, f"messages.{i}", backend) for i, message in enumerate(messages)]


def _plain(message: Mapping[str, Any], where: str, backend: str) -> dict[str, str]:
    for name, value in message.items():
        if name not in _PLAIN and value not in (None, []):
            raise UnsupportedField(
                f"'{where}.{name}' is not supported by {backend}{elsewhere(name)}",
                param=f"{where}.{name}",
                code="unsupported_field",
            )
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_text_of(part, where, backend) for part in content)
    if not isinstance(content, str):
        raise RequestError(
            f"'{where}.content' should be a string or a list of text parts",
            param=f"{where}.content",
        )
    plain = {"role": message["role"], "content": content}
    who = message.get("name")
    if who is None:
        return plain
    if not isinstance(who, str):
        raise RequestError(f"'{where}.name' should be a string", param=f"{where}.name")
    return plain | {"name": who}


def _text_of(part: Any, where: str, backend: str) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise UnsupportedField(
            f"'{where}.content' has a part that is no text, which {backend} does not support",
            param=f"{where}.content",
            code="unsupported_field",
        )
    return text


def _chunk(
    index: int, delta: dict[str, str], positions: Sequence[PositionLogprobs] | None = None
) -> dict[str, Any]:
    logprobs = None if positions is None else _chat_logprobs(positions)
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _chat_logprobs(positions: Sequence[PositionLogprobs]) -> dict[str, Any]:
    content = [
        _token(p.chosen) | {"top_logprobs": [_token(token) for token in p.top]} for p in positions
    ]
    return {"content": content, "refusal": None}


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {
        "token": token.text,
        "logprob": LOWEST_LOGPROB if token.logprob is None else max(token.logprob, LOWEST_LOGPROB),
        "bytes": list(token.bytes),
    }
