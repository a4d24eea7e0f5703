"""Checks the contract of every backend. Each check takes a started backend, fake or real.

    for check in CHECKS:
        await check(backend, "def f(x):", token_ids)

`text` and `token_ids` are a prompt of the model, and `token_ids` are those of `text`. Backends that
return log-probabilities owe WITH_LOGPROBS as well, the others WITHOUT_LOGPROBS.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import aclosing
from typing import Any

import pytest

from octet.errors import RequestError, UnsupportedField
from serve.backends.base import Backend
from serve.engine.request import Delta, Event, Finished, GenerateRequest

__all__ = [
    "CHECKS",
    "WITHOUT_LOGPROBS",
    "WITH_LOGPROBS",
    "Check",
    "ask",
    "collect",
    "freed_within",
    "owed",
]

FREED_S = 0.2  # from the moment when a client goes away until its request no longer runs


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


async def log_probabilities_are_refused_by_name(
    backend: Backend, text: str, _token_ids: tuple[int, ...]
) -> None:
    with pytest.raises(UnsupportedField) as refused:
        await collect(backend, ask(backend, text, logprobs=1))
    assert refused.value.param == "logprobs" and backend.name in str(refused.value)


async def twenty_requests_at_once_keep_their_answers(
    backend: Backend, text: str, _token_ids: tuple[int, ...]
) -> None:
    prompts = [text + " " * i for i in range(20)]
    alone = [(await collect(backend, ask(backend, prompt)))[0] for prompt in prompts]
    together = await asyncio.gather(*(collect(backend, ask(backend, p)) for p in prompts))
    assert [answer for answer, _ in together] == alone


async def without_a_limit_it_goes_on(
    backend: Backend, text: str, _token_ids: tuple[int, ...]
) -> None:
    """Beyond vLLM's default of 16 tokens; for 24 events here, so as not to wait for all of them."""
    stream: Any = backend.generate(ask(backend, text, max_tokens=None))
    events = 0
    async with aclosing(stream):
        async for event in stream:
            events += 1
            if isinstance(event, Finished):
                assert event.usage.completion_tokens > 16
            elif events == 24:
                return


async def a_probe_generates_a_token(
    backend: Backend, _text: str, _token_ids: tuple[int, ...]
) -> None:
    async with asyncio.timeout(60):
        await backend.probe()


async def a_held_connection_lasts(backend: Backend, text: str, _token_ids: tuple[int, ...]) -> None:
    holding = asyncio.create_task(backend.hold())
    await collect(backend, ask(backend, text))
    assert not holding.done()
    holding.cancel()
    await asyncio.gather(holding, return_exceptions=True)
    assert holding.cancelled() and await backend.ready()


async def a_report_of_load_makes_sense(
    backend: Backend, text: str, token_ids: tuple[int, ...]
) -> None:
    report = await backend.load()
    if report is None:  # allowed; who must report one is tested by name
        return
    assert report.running >= 0 and report.waiting >= 0
    assert report.kv_usage is None or 0 <= report.kv_usage <= 1
    assert report.capacity_tokens is None or report.capacity_tokens > len(token_ids)
    await collect(backend, ask(backend, text))
    assert await backend.load() is not None


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


async def freed_within(
    backend: Backend, text: str, running: Callable[[], Awaitable[int]]
) -> tuple[float, float]:
    """Seconds until `running` (requests in the server) is 0 after a client has gone away.

    The first is of a closed iterator, after its first token; the second of a cancelled task. Each
    is the first of ten that is within FREED_S, or else the best, after one for a warm start: a busy
    machine only adds to what is measured.
    """
    await _freed(backend, text, running, cancel=False)
    best = {False: math.inf, True: math.inf}
    for cancel in best:
        for _ in range(10):
            best[cancel] = min(best[cancel], await _freed(backend, text, running, cancel=cancel))
            if best[cancel] < FREED_S:
                break
    return best[False], best[True]


async def _freed(
    backend: Backend, text: str, running: Callable[[], Awaitable[int]], *, cancel: bool
) -> float:
    async with asyncio.timeout(60):
        stream = await _seen_running(backend, text, running)
    waiting = asyncio.ensure_future(anext(stream)) if cancel else None
    await asyncio.sleep(0)  # it waits
    started = time.perf_counter()
    if waiting is not None:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    await stream.aclose()
    async with asyncio.timeout(60):
        while await running():
            await asyncio.sleep(0.005)
    return time.perf_counter() - started


async def _seen_running(backend: Backend, text: str, running: Callable[[], Awaitable[int]]) -> Any:
    """A stream that has begun and goes on: on a busy machine one may end before it is looked at."""
    while True:
        stream: Any = backend.generate(ask(backend, text, max_tokens=400))
        await anext(stream)
        for _ in range(100):
            if await running():
                return stream
            await asyncio.sleep(0.01)
        await stream.aclose()


Check = Callable[[Backend, str, tuple[int, ...]], Awaitable[None]]
CHECKS: Sequence[Check] = (
    deltas_then_one_finished,
    text_and_token_ids_are_one_prompt,
    a_seed_gives_the_same_sample_again,
    a_stop_string_ends_the_answer_before_it,
    twenty_requests_at_once_keep_their_answers,
    without_a_limit_it_goes_on,
    a_closed_iterator_harms_nobody_else,
    a_prompt_beyond_the_context_is_refused,
    a_probe_generates_a_token,
    a_held_connection_lasts,
    a_report_of_load_makes_sense,
)
WITH_LOGPROBS: Sequence[Check] = (log_probabilities_are_those_of_the_most_likely_tokens,)
WITHOUT_LOGPROBS: Sequence[Check] = (log_probabilities_are_refused_by_name,)


def owed(kinds: Iterable[str], without_logprobs: Collection[str]) -> list[Any]:
    """Parameters of a test: each kind of backend with each check that it owes."""
    return [
        pytest.param(kind, check, id=f"{kind}-{check.__name__}")
        for kind in kinds
        for check in (*CHECKS, *(WITHOUT_LOGPROBS if kind in without_logprobs else WITH_LOGPROBS))
    ]
