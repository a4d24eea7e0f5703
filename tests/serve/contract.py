"""What every backend owes the gateway. Each check takes a started backend, fake or real.

    for check in CHECKS:
        await check(backend, "def f(x):", token_ids)

`text` and `token_ids` are a prompt of the model, and `token_ids` are those of `text`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

import pytest

from octet.errors import RequestError
from serve.backends.base import Backend
from serve.types import Delta, Event, Finished, GenerateRequest

__all__ = ["CHECKS", "ask", "collect"]


def ask(backend: Backend, prompt: Any, **fields: Any) -> GenerateRequest:
    """A greedy request for twelve tokens, whatever the model thinks of its end."""
    settings = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **fields}
    return GenerateRequest(request_id="r", model=backend.models[0], prompt=prompt, **settings)


async def collect(backend: Backend, request: GenerateRequest) -> tuple[str, list[Event]]:
    """The whole text, and the events that brought it."""
    events = [event async for event in backend.generate(request)]
    return "".join(event.text for event in events if isinstance(event, Delta)), events


async def deltas_then_one_finished(backend: Backend, text: str, token_ids: tuple[int, ...]) -> None:
    answer, events = await collect(backend, ask(backend, text))
    *deltas, end = events
    assert answer and all(isinstance(delta, Delta) for delta in deltas)
    assert isinstance(end, Finished) and end.reason == "length"
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (len(token_ids), 12)


async def text_and_token_ids_are_one_prompt(
    backend: Backend, text: str, token_ids: tuple[int, ...]
) -> None:
    by_text, _ = await collect(backend, ask(backend, text))
    assert by_text == (await collect(backend, ask(backend, token_ids)))[0]


async def a_seed_gives_the_same_sample_again(
    backend: Backend, text: str, _token_ids: tuple[int, ...]
) -> None:
    samples = [
        (await collect(backend, ask(backend, text, temperature=1.5, seed=seed)))[0]
        for seed in (1, 1, 2, 3)
    ]
    assert samples[0] == samples[1]
    assert len(set(samples)) > 1


async def a_stop_string_ends_the_answer_before_it(
    backend: Backend, text: str, _token_ids: tuple[int, ...]
) -> None:
    free, _ = await collect(backend, ask(backend, text, max_tokens=20))
    stop = free[len(free) // 2 :][:2]
    cut, events = await collect(backend, ask(backend, text, max_tokens=20, stop=(stop,)))
    assert cut == free[: free.index(stop)]
    assert isinstance(events[-1], Finished) and events[-1].reason == "stop"


async def log_probabilities_are_those_of_the_most_likely_tokens(
    backend: Backend, text: str, _token_ids: tuple[int, ...]
) -> None:
    _, events = await collect(backend, ask(backend, text, logprobs=3))
    positions = [p for e in events if isinstance(e, Delta) for p in e.logprobs or ()]
    assert len(positions) == 12
    for position in positions:
        top = [token.logprob or 0.0 for token in position.top]
        assert len(top) == 3 and max(top) <= 0 and top == sorted(top, reverse=True)
        # Greedy: the chosen token is the first, or ties with it.
        assert position.chosen.logprob == pytest.approx(top[0], abs=1e-6)
        assert position.chosen.token_id in {token.token_id for token in position.top}


async def requests_at_once_keep_their_answers(
    backend: Backend, text: str, _token_ids: tuple[int, ...]
) -> None:
    prompts = [text + " " * i for i in range(6)]
    alone = [(await collect(backend, ask(backend, prompt)))[0] for prompt in prompts]
    together = await asyncio.gather(*(collect(backend, ask(backend, p)) for p in prompts))
    assert [answer for answer, _ in together] == alone


async def a_closed_iterator_harms_nobody_else(
    backend: Backend, text: str, _token_ids: tuple[int, ...]
) -> None:
    expected, _ = await collect(backend, ask(backend, text))
    stream: Any = backend.generate(ask(backend, text, max_tokens=200))
    async with aclosing(stream):
        await anext(stream)
    assert (await collect(backend, ask(backend, text)))[0] == expected
    assert await backend.ready()


async def a_prompt_beyond_the_context_is_refused(
    backend: Backend, _text: str, token_ids: tuple[int, ...]
) -> None:
    with pytest.raises(RequestError) as refused:
        await collect(backend, ask(backend, token_ids * 3000))
    assert refused.value.status == 400


Check = Callable[[Backend, str, tuple[int, ...]], Awaitable[None]]
CHECKS: Sequence[Check] = (
    deltas_then_one_finished,
    text_and_token_ids_are_one_prompt,
    a_seed_gives_the_same_sample_again,
    a_stop_string_ends_the_answer_before_it,
    log_probabilities_are_those_of_the_most_likely_tokens,
    requests_at_once_keep_their_answers,
    a_closed_iterator_harms_nobody_else,
    a_prompt_beyond_the_context_is_refused,
)
