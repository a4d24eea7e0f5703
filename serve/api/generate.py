"""Answers of backends that yield tokens: the events of each choice, merged and rendered.

`n` choices are n requests to the backend. Choice j of a request with a seed gets `seed + j`: the
first equals the answer to `n: 1`, and each can be reproduced alone.
"""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Protocol

from serve.api.answer import DONE, EVENT_STREAM, JSON, Answer, Tally
from serve.api.schemas import ChatRequest, CompletionRequest
from serve.backends.base import Backend
from serve.engine.request import (
    Delta,
    Event,
    Finished,
    GenerateRequest,
    PositionLogprobs,
    TokenLogprob,
)

__all__ = ["LOWEST_LOGPROB", "Dialect", "open_generate", "requests_of"]

LOWEST_LOGPROB = -9999.0  # JSON has no -Infinity; vLLM's stand-in for a probability of zero
PENDING_EVENTS = 64  # per answer; beyond it, the choices wait for a slow client


class Dialect(Protocol):
    """Writes the choices of one endpoint; the envelope around them is the same for both."""

    id_prefix: str
    object: str
    chunk_object: str

    def choice(self, index: int, deltas: Sequence[Delta], end: Finished) -> dict[str, Any]:
        """Returns a whole choice."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """Returns the choice of the chunk before the first event, or None for no such chunk."""

    def delta(self, index: int, delta: Delta) -> dict[str, Any]:
        """Returns the choice of a chunk."""

    def end(self, index: int, end: Finished) -> dict[str, Any]:
        """Returns the choice of the last chunk of `index`."""


def requests_of(
    body: CompletionRequest | ChatRequest,
    prompts: Sequence[str | tuple[int, ...]],
    request_id: str,
    headers: Mapping[str, str] | None = None,
) -> list[GenerateRequest]:
    """Builds one request per choice, prompt by prompt; each carries `headers`."""
    n = body.n or 1
    return [
        GenerateRequest(
            request_id=f"{request_id}-{index}",
            model=body.model,
            prompt=prompts[index // n],
            max_tokens=body.answer_limit,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=max(body.top_k or 0, 0),
            seed=None if body.seed is None else (body.seed + index % n) % 2**64,
            stop=body.stop,
            stop_token_ids=tuple(body.stop_token_ids or ()),
            logprobs=body.alternatives,
            echo=bool(getattr(body, "echo", None)),
            ignore_eos=bool(body.ignore_eos),
            headers=headers or {},
        )
        for index in range(len(prompts) * n)
    ]


async def open_generate(
    backend: Backend,
    dialect: Dialect,
    body: CompletionRequest | ChatRequest,
    requests: Sequence[GenerateRequest],
) -> Answer:
    """Starts every choice, and waits for the first event, or for all of them if not streamed.

    Raises the error with which the backend refuses the request.
    """
    tally = Tally()
    envelope = {
        "id": f"{dialect.id_prefix}-{uuid.uuid4().hex}",
        "object": dialect.chunk_object if body.stream else dialect.object,
        "created": int(time.time()),
        "model": body.model,
    }
    streams = [backend.generate(request) for request in requests]
    if body.stop and body.alternatives is not None:
        streams = [_in_step(stream) for stream in streams]
    if body.return_tokens_as_token_ids:
        streams = [_named_by_id(stream) for stream in streams]
    events = _merge(streams)
    per_prompt = body.n or 1
    if not body.stream:
        content = await _whole(events, dialect, envelope, len(requests), per_prompt, tally)
        return Answer(200, {"content-type": JSON}, content, tally=tally)
    chunks = _chunks(events, dialect, envelope, body.include_usage, per_prompt, tally)
    try:
        first = await anext(chunks)
    except BaseException:
        await chunks.aclose()
        raise
    return Answer(200, {"content-type": EVENT_STREAM}, first, chunks, tally)


async def _whole(
    events: AsyncGenerator[tuple[int, Event], None],
    dialect: Dialect,
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
    choices = [dialect.choice(i, deltas[i], ends[i]) for i in range(count)]
    return _dumps(envelope | {"choices": choices, "usage": _usage(tally)})


async def _chunks(
    events: AsyncGenerator[tuple[int, Event], None],
    dialect: Dialect,
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
                opening = dialect.opening(index)
                piece = head + _dumps(opening) + tail if opening is not None else b""
            if isinstance(event, Finished):
                _add(tally, event, counts_prompt=index % per_prompt == 0)
                piece += head + _dumps(dialect.end(index, event)) + tail
            elif event.text or event.logprobs:
                piece += head + _dumps(dialect.delta(index, event)) + tail
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
