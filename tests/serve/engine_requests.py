"""Requests to the engine on the fake model, and what the model itself would answer to them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from serve.backends.embedded import EmbeddedBackend
from serve.engine.request import Delta, Event, Finished, GenerateRequest
from serve.engine.sampler import Sampling, sample
from tests.fakes import END, FakeRunner, fake_backend, fake_logits

__all__ = ["ask", "collect", "expected", "running", "text_of"]


def ask(prompt: str | tuple[int, ...], **fields: Any) -> GenerateRequest:
    defaults: dict[str, Any] = {"request_id": "r", "model": "fake", "temperature": 0.0}
    return GenerateRequest(prompt=prompt, **(defaults | fields))


def expected(request: GenerateRequest, context: int = 512) -> list[int]:
    """The token ids of the answer, the end token included; stop strings are left out."""
    prompt = request.prompt
    tokens = list(prompt.encode()) if isinstance(prompt, str) else list(prompt)
    answer: list[int] = []
    sampling = Sampling.of(request)
    room = context - len(tokens)
    while len(answer) < min(request.max_tokens or room, room):
        token = int(sample(fake_logits(tokens + answer)[None], [sampling])[0])
        answer.append(token)
        if token in request.stop_token_ids or (token == END and not request.ignore_eos):
            break
    return answer


def text_of(tokens: list[int]) -> str:
    return bytes(token for token in tokens if token != END).decode(errors="replace")


@asynccontextmanager
async def running(
    runner: FakeRunner | None = None, **options: int
) -> AsyncIterator[EmbeddedBackend]:
    """A started backend; at the end every slot must be free and its memory zero."""
    backend = fake_backend(runner, **options)
    await backend.start()
    assert backend._started is not None
    engine = backend._started.engine
    try:
        yield backend
    finally:
        await backend.close()
    assert engine.cache.free_slots == engine.cache.slots
    assert not engine.cache.codes.any() and not engine.cache.lengths.any()
    assert not backend._streams


async def collect(
    backend: EmbeddedBackend, request: GenerateRequest
) -> tuple[str, list[int], Finished]:
    events: list[Event] = [event async for event in backend.generate(request)]
    *deltas, last = events
    assert isinstance(last, Finished)
    assert all(isinstance(delta, Delta) for delta in deltas)
    text = "".join(delta.text for delta in deltas if isinstance(delta, Delta))
    ids = [token for delta in deltas if isinstance(delta, Delta) for token in delta.token_ids]
    return text, ids, last
