"""Completions in OpenAI's protocol: writes a request's body, parses its stream into events."""

import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from octet.errors import BackendError
from serve.backends.bounds import MAX_EVENT, MAX_TOKENS
from serve.backends.openai_errors import from_event
from serve.engine.request import (
    Delta,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    PositionLogprobs,
    TokenLogprob,
    Usage,
)

__all__ = ["completion_body", "completion_events"]

_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
_TOO_LARGE = (OverflowError, RecursionError)  # raised for a number, for deep nesting


def completion_body(request: GenerateRequest, model: str, limit: int | None) -> dict[str, Any]:
    """Returns the body of a streamed completion; most options at their default are left out.

    `limit` replaces a `max_tokens` of None: without one, an answer ends after 16 tokens.
    """
    return {
        "model": model,
        "prompt": request.prompt if isinstance(request.prompt, str) else list(request.prompt),
        "temperature": request.temperature,
        "top_p": request.top_p,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": limit if request.max_tokens is None else request.max_tokens,
        **request.extra,
        **({"top_k": request.top_k} if request.top_k else {}),
        **({"echo": True} if request.echo else {}),
        **request.optional,
    }


async def completion_events(
    name: str, content: AsyncIterator[bytes], alternatives: int
) -> AsyncGenerator[Event, None]:
    """Yields the Deltas of a streamed completion, then its Finished.

    Raises BackendError (garbled) for a stream of any other form, or one that ends before its usage.
    """
    reason: str | None = None
    stop_reason: str | int | None = None
    offset = 0
    try:
        async for event in _sse(content):
            if "error" in event:
                raise from_event(name, event["error"])
            for choice in event.get("choices") or ():
                delta = _delta(choice, offset, alternatives)
                offset += len(delta.text)
                if delta.text or delta.token_ids or delta.logprobs:
                    yield delta
                reason = choice.get("finish_reason") or reason
                stop_reason = _stop_reason(choice, stop_reason)
            usage = event.get("usage")
            if usage and reason:
                if reason not in _REASONS:
                    raise BackendError(f"{name}: the answer ended with '{reason}'")
                answered = _count(usage.get("completion_tokens") or 0)
                counts = Usage(_count(usage["prompt_tokens"]), answered)
                yield Finished(_REASONS[reason], counts, stop_reason)
                return
    except (LookupError, TypeError, ValueError, AttributeError, *_TOO_LARGE) as error:
        raise BackendError(
            f"{name}: its stream is not one of completions ({error!r})", kind="garbled"
        ) from error
    raise BackendError(f"{name}: the stream ended without its usage", kind="garbled")


def _stop_reason(choice: dict[str, Any], before: str | int | None) -> str | int | None:
    """Reads vLLM's `stop_reason`, which SGLang calls `matched_stop`."""
    for name in ("stop_reason", "matched_stop"):
        found = choice.get(name)
        if isinstance(found, str | int):
            return found
    return before


def _delta(choice: dict[str, Any], offset: int, alternatives: int) -> Delta:
    """Returns the Delta of a streamed choice that begins `offset` characters into the answer.

    It has token ids only if the server sends them. vLLM lists the chosen token in addition to the
    `alternatives` most likely ones.
    """
    text, token_ids = choice.get("text") or "", tuple(map(_count, choice.get("token_ids") or ()))
    if not isinstance(text, str):
        raise TypeError(f"text is {type(text).__name__}")
    found = choice.get("logprobs")
    if not found:
        return Delta(text, token_ids)
    tops = found.get("top_logprobs") or [None] * len(found["tokens"])
    positions = []
    for name, logprob, top in zip(found["tokens"], found["token_logprobs"], tops, strict=True):
        # Null: the first token of an echoed prompt has none, and vLLM writes NaN so.
        nulls_last = sorted(
            (top or {}).items(), key=lambda item: (item[1] is None, -(item[1] or 0))
        )
        likely = nulls_last[:alternatives]
        best = tuple(_token(other, value) for other, value in likely)
        positions.append(PositionLogprobs(_token(name, logprob), best, offset))
    return Delta(text, token_ids, tuple(positions))


def _token(name: str, logprob: Any) -> TokenLogprob:
    """Reads a token from the server's name for it: `token_id:N` from vLLM, else its text alone."""
    number = name.removeprefix("token_id:")
    if number != name and number.isdigit():
        return TokenLogprob(int(number), "", b"", _nats(logprob))
    return TokenLogprob(-1, name, name.encode(), _nats(logprob))


def _count(value: Any) -> int:
    """Checks a number of tokens, or a token id. Raises TypeError."""
    if type(value) is not int or not 0 <= value < MAX_TOKENS:
        raise TypeError(f"{str(value)[:80]!r} is no number of tokens, nor the id of one")
    return value


def _nats(value: Any) -> float | None:
    """Reads a log-probability. Lets NaN and infinities pass: they are judged elsewhere."""
    if value is None:
        return None
    if not isinstance(value, int | float):
        raise TypeError(f"{str(value)[:80]!r} is no log-probability")
    return float(value)


async def _sse(content: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """Yields the JSON of each event. Skips comments, event names and ids; lines may end in CRLF.

    Raises ValueError for data that is not a JSON object, and for an event cut off at the end.
    """
    held = bytearray()
    async for piece in content:
        held += piece
        if b"\n" not in piece:
            if len(held) > MAX_EVENT:
                raise ValueError(f"an event has more than {MAX_EVENT} bytes")
            continue
        *lines, last = bytes(held).split(b"\n")
        held[:] = last
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data and data != b"[DONE]":
                event = json.loads(data)
                if not isinstance(event, dict):
                    raise ValueError(f"{data[:80]!r} is not an object")
                yield event
    if held.strip() and held.strip() != b"data: [DONE]":
        raise ValueError("it ends within an event")
