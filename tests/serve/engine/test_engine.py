"""The engine's loop on the fake runner: what is answered, when it ends, and what is left behind.

The fake model reads its own past from the cache, so a wrong slot or position changes the answer;
`expected` computes the same answer without any engine.
"""

import asyncio
import itertools
import random
import threading

import numpy as np
import pytest

from octet.errors import BackendError, BackendUnavailable, ConfigError, RequestError
from serve.backends.embedded import EmbeddedBackend
from serve.engine.request import Delta
from serve.runner.protocol import SlotCache, StepBatch
from tests.fakes import END, FakeRunner, fake_backend, opened
from tests.serve.engine_requests import ask, collect, expected, running, text_of
from tests.serve.waiting import until


async def test_answers_are_those_of_the_model() -> None:
    async with running() as backend:
        for prompt, limit in (*((p, 100) for p in ("hello", "a", "héé", "x" * 300)), ("def f", 1)):
            request = ask(prompt, max_tokens=limit)
            text, ids, last = await collect(backend, request)
            tokens = expected(request)
            assert ids == tokens
            assert text == text_of(tokens)
            assert last.reason == ("stop" if tokens[-1] == END else "length")
            assert last.usage.prompt_tokens == len(prompt.encode())
            assert last.usage.completion_tokens == len(tokens)


async def test_requests_together_get_the_answers_they_get_alone() -> None:
    requests = [
        ask(f"prompt {i}" * (1 + i % 5), max_tokens=60, temperature=[0, 0.7, 1.5][i % 3], seed=i)
        for i in range(40)
    ]
    runner = FakeRunner()
    async with running(runner, slots=8) as backend:
        answers = await asyncio.gather(*(collect(backend, request) for request in requests))
    assert max(runner.batches) == 8, "requests were not batched"
    for request, (_, ids, _) in zip(requests, answers, strict=True):
        assert ids == expected(request)


async def test_a_request_joins_while_another_is_decoding() -> None:
    runner = FakeRunner(delay_s=0.002)
    async with running(runner) as backend:
        first = asyncio.create_task(collect(backend, ask("a", max_tokens=200, ignore_eos=True)))
        await until(lambda: len(runner.batches) > 20)
        await collect(backend, ask("b", max_tokens=5, ignore_eos=True))
        assert not first.done(), "the second request waited for the first"
        assert 2 in runner.batches, "they were not decoded in one batch"
        assert len((await first)[1]) == 200


async def test_a_long_prompt_lets_others_go_on() -> None:
    runner = FakeRunner(context=4096)
    async with running(runner) as backend:
        stream = backend.generate(ask("a", max_tokens=400, ignore_eos=True))
        await anext(stream)
        runner.gate.clear()
        long = asyncio.create_task(collect(backend, ask("x" * 2000, max_tokens=1)))
        await until(lambda: backend.stats.waiting + backend.stats.running == 2)
        read_from = len(runner.lengths)
        runner.gate.set()
        await long
        await stream.aclose()
    steps = runner.lengths[read_from:]
    chunks = [index for index, length in enumerate(steps) if length > 1]
    assert [steps[i] for i in chunks] == [256] * 7 + [208]
    assert all(b - a > 1 for a, b in itertools.pairwise(chunks)), steps


async def test_hundreds_of_requests_with_cancellations() -> None:
    chance = random.Random(7)
    runner = FakeRunner()

    async def one(backend: EmbeddedBackend, index: int) -> None:
        request = ask(
            tuple(chance.randrange(256) for _ in range(chance.randint(1, 90))),
            max_tokens=chance.randint(1, 40),
            temperature=chance.choice([0.0, 1.0]),
            seed=index,
            ignore_eos=chance.random() < 0.3,
        )
        leave_after = chance.randint(0, 20) if chance.random() < 0.4 else None
        await asyncio.sleep(chance.random() * 0.5)
        if leave_after == 0:
            task = asyncio.create_task(collect(backend, request))
            await asyncio.sleep(chance.random() * 0.02)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return
        stream, ids = backend.generate(request), []
        async for event in stream:
            if isinstance(event, Delta):
                ids.extend(event.token_ids)
            if leave_after is not None and len(ids) >= leave_after:
                break
        await stream.aclose()
        whole = expected(request)
        assert ids == whole[: len(ids)] and (leave_after is not None or len(ids) == len(whole))

    async with running(runner, slots=6) as backend:
        await asyncio.gather(*(one(backend, index) for index in range(300)))
        assert await backend.ready()
        await until(lambda: backend.stats.running == backend.stats.waiting == 0)
    assert max(runner.batches) == 6


async def test_length_is_the_reason_at_the_end_of_the_context() -> None:
    async with running(FakeRunner(context=100)) as backend:
        for limit in (None, 100):
            _, ids, last = await collect(backend, ask("x" * 90, max_tokens=limit, ignore_eos=True))
            assert last.reason == "length" and len(ids) == 10


async def test_the_end_token_stops_and_is_not_text() -> None:
    request = ask("hello", max_tokens=100)
    tokens = expected(request)
    assert tokens[-1] == END, "choose a prompt whose answer ends"
    async with running() as backend:
        text, ids, last = await collect(backend, request)
        assert (ids, last.reason, last.stop_reason) == (tokens, "stop", None)
        assert "<|end|>" not in text
        exact = ask("hello", max_tokens=len(tokens))
        assert (await collect(backend, exact))[2].reason == "stop"
        _, more, _ = await collect(backend, ask("hello", max_tokens=100, ignore_eos=True))
        assert len(more) == 100 and more[: len(tokens)] == tokens


async def test_a_stop_token_stops_even_when_the_end_token_is_ignored() -> None:
    tokens = expected(ask("a", max_tokens=50, ignore_eos=True))
    stop = tokens[20]
    async with running() as backend:
        request = ask("a", max_tokens=50, ignore_eos=True, stop_token_ids=(stop,))
        text, ids, last = await collect(backend, request)
    end = tokens.index(stop)
    assert (ids, last.reason, last.stop_reason) == (tokens[: end + 1], "stop", stop)
    assert text == text_of(tokens[:end])


async def test_a_seed_makes_sampling_repeatable() -> None:
    async with running() as backend:
        first, second, other, free, free_again = [
            (await collect(backend, ask("q", max_tokens=40, temperature=1.5, seed=seed)))[1]
            for seed in (3, 3, 4, None, None)
        ]
    assert first == second != other
    assert free != free_again


async def test_an_error_in_a_step_fails_those_in_it_and_no_one_else() -> None:
    poison = 1
    async with running(FakeRunner(poison=frozenset({poison}))) as backend:
        other = asyncio.create_task(collect(backend, ask("fine", max_tokens=30, ignore_eos=True)))
        with pytest.raises(BackendError, match="told to fail"):
            await collect(backend, ask((65, poison), max_tokens=5))
        assert len((await other)[1]) == 30
        assert await backend.ready()


async def test_a_failing_decoding_step_fails_its_batch_and_the_engine_goes_on() -> None:
    answer = expected(ask("b", max_tokens=3, ignore_eos=True))
    async with running(FakeRunner(poison=frozenset({answer[1]}))) as backend:
        with pytest.raises(BackendError, match="told to fail"):
            await collect(backend, ask("b", max_tokens=9, ignore_eos=True))
        assert await backend.ready()
        await collect(backend, ask("zz", max_tokens=1))


class NoNumbers(FakeRunner):
    """Gives NaN to the rows whose last token is 1."""

    def forward(self, step: StepBatch, cache: SlotCache) -> np.ndarray:
        logits = super().forward(step, cache)
        logits[step.token_ids[:, -1] == 1] = np.nan
        return logits


async def test_nan_logits_are_an_error_of_that_request_alone() -> None:
    async with running(NoNumbers()) as backend:
        other = asyncio.create_task(collect(backend, ask("fine", max_tokens=20)))
        with pytest.raises(BackendError, match="not finite"):
            await collect(backend, ask((65, 1)))
        await other


async def test_closing_fails_what_is_running_and_refuses_what_comes() -> None:
    async with running(FakeRunner(delay_s=0.005), slots=1) as backend:
        tasks = [
            asyncio.create_task(collect(backend, ask("a", max_tokens=400, ignore_eos=True)))
            for _ in range(3)
        ]
        await until(lambda: backend.stats.running == 1 and backend.stats.waiting == 2)
        await backend.close()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, BackendError)
        assert not await backend.ready()
        with pytest.raises(BackendUnavailable):
            await collect(backend, ask("a"))


async def test_draining_lets_the_running_requests_end() -> None:
    async with running(FakeRunner(delay_s=0.002)) as backend:
        assert backend._started is not None
        engine = backend._started.engine
        task = asyncio.create_task(collect(backend, ask("a", max_tokens=50, ignore_eos=True)))
        await until(lambda: backend.stats.running == 1)
        closing = threading.Thread(target=engine.close, args=(10.0,))
        closing.start()
        assert len((await task)[1]) == 50
        await asyncio.to_thread(closing.join)
        assert not await backend.ready()


async def test_requests_that_cannot_be_run_are_refused_with_the_field() -> None:
    cases = [
        (ask(""), "prompt", "empty"),
        (ask((1, 9999)), "prompt", "9999"),
        (ask((-1,)), "prompt", "-1"),
        (ask("x" * 512), "prompt", "512"),
        (ask("x", extra={"min_p": 0.1}), "min_p", "min_p"),
    ]
    async with running() as backend:
        for request, param, part in cases:
            with pytest.raises(RequestError, match=part) as caught:
                await collect(backend, request)
            assert caught.value.param == param and caught.value.status == 400
        _, ids, _ = await collect(backend, ask("x" * 511, ignore_eos=True))
        assert len(ids) == 1


async def test_before_start_it_is_not_ready_and_says_so() -> None:
    backend = fake_backend()
    assert not await backend.ready() and backend.stats is await backend.load() is None
    with pytest.raises(BackendUnavailable, match="not been started"):
        await collect(backend, ask("a"))
    await backend.close()


async def test_sizes_that_the_model_does_not_have_are_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="1 to 512"):
        await fake_backend(context=513).start()
    async with opened(fake_backend(context=20)) as backend:
        assert backend.context_length == 20


async def test_an_answer_longer_than_the_context_is_a_mistake_one_that_leaves_no_room_is_not() -> (
    None
):
    async with running(FakeRunner(context=32)) as backend:
        _, _, end = await collect(backend, ask("a" * 20, max_tokens=32, ignore_eos=True))
        assert end.usage.completion_tokens == 12 and end.reason == "length"
        with pytest.raises(RequestError, match="max_tokens of 33") as refused:
            await collect(backend, ask("a", max_tokens=33))
    assert (refused.value.param, refused.value.code) == ("max_tokens", "context_length_exceeded")


async def test_a_text_that_no_tokens_could_hold_is_not_tokenized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    longest = len("<|end|>")
    async with running(FakeRunner(context=32)) as backend:
        monkeypatch.setattr(
            "serve.engine.tokenizer.Tokenizer.encode", None
        )  # would be called to tell
        for size, encodes in ((32 * longest + 1, False), (32 * longest, True)):
            with pytest.raises(TypeError if encodes else RequestError):
                await collect(backend, ask("a" * size, max_tokens=1))
            with pytest.raises(TypeError if encodes else RequestError):
                backend.chat_prompt([{"role": "user", "content": "a" * size}])
