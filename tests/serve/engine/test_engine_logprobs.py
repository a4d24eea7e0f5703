"""Log-probabilities of the engine on the fake runner, of answers and of echoed prompts."""

import numpy as np
import pytest

from serve.engine.request import Delta, Finished, Usage
from serve.engine.sampler import log_softmax
from tests.fakes import END, fake_logits
from tests.serve.engine_requests import ask, collect, running


async def test_logprobs_are_those_of_the_raw_logits() -> None:
    request = ask(
        "log", max_tokens=6, temperature=1.7, top_k=5, seed=1, logprobs=3, ignore_eos=True
    )
    async with running() as backend:
        events = [event async for event in backend.generate(request)]
    tokens = [*b"log"]
    offset = 0
    for delta in events[:-1]:
        assert isinstance(delta, Delta) and delta.logprobs is not None
        (position,) = delta.logprobs
        logprobs = log_softmax(fake_logits(tokens))
        chosen = position.chosen
        assert (chosen.token_id,) == delta.token_ids
        assert chosen.logprob == pytest.approx(logprobs[chosen.token_id], abs=1e-12)
        assert [top.token_id for top in position.top] == np.argsort(-logprobs)[:3].tolist()
        assert chosen.bytes == bytes([chosen.token_id])
        assert position.text_offset == offset
        offset += len(delta.text)
        tokens.append(chosen.token_id)


@pytest.mark.parametrize("length", [1, 5, 300])
async def test_an_echoed_prompt_is_scored_at_every_token(length: int) -> None:
    prompt = ("abcdé" * 100)[:length]
    request = ask(prompt, max_tokens=3, echo=True, logprobs=2, ignore_eos=True)
    async with running() as backend:
        events = [event async for event in backend.generate(request)]
    tokens = list(prompt.encode())
    first = events[0]
    assert isinstance(first, Delta) and first.logprobs is not None
    assert first.text == prompt and list(first.token_ids) == tokens
    assert len(first.logprobs) == len(tokens) and first.logprobs[0].chosen.logprob is None
    for index, position in enumerate(first.logprobs[1:], start=1):
        logprobs = log_softmax(fake_logits(tokens[:index]))
        assert position.chosen.token_id == tokens[index]
        assert position.chosen.logprob == pytest.approx(logprobs[tokens[index]], abs=1e-12)
        assert position.text_offset == len(bytes(tokens[:index]).decode(errors="ignore"))
    answer = events[1]
    assert isinstance(answer, Delta) and answer.logprobs is not None
    assert answer.logprobs[0].text_offset == length
    last = events[-1]
    assert isinstance(last, Finished) and last.usage.completion_tokens == 3


async def test_an_echoed_prompt_with_a_special_token_has_the_offsets_of_its_text() -> None:
    prompt = "a<|end|>bé"
    request = ask(prompt, max_tokens=2, echo=True, logprobs=0, ignore_eos=True)
    async with running() as backend:
        first, answer, *_ = [event async for event in backend.generate(request)]
    assert isinstance(first, Delta) and first.logprobs is not None
    assert first.text == prompt and first.token_ids == (97, END, 98, 0xC3, 0xA9)
    assert [position.text_offset for position in first.logprobs] == [0, 1, 8, 9, 9]
    assert isinstance(answer, Delta) and answer.logprobs is not None
    assert answer.logprobs[0].text_offset == len(prompt)


@pytest.mark.parametrize("length", [1, 300, 512])
async def test_a_prompt_is_scored_without_an_answer(length: int) -> None:
    """As scoring clients request it: max_tokens: 0, echo: true; the context may be full."""
    prompt = "a" * length
    scored = ask(prompt, max_tokens=0, echo=True, logprobs=1)
    async with running() as backend:
        echo, end = [event async for event in backend.generate(scored)]
        _, ids, _ = await collect(backend, ask("a", max_tokens=1, ignore_eos=True))
    assert isinstance(echo, Delta) and echo.logprobs is not None
    assert echo.text == prompt and len(echo.logprobs) == length
    assert isinstance(end, Finished) and end.reason == "length"
    assert end.usage == Usage(length, 0)
    assert len(ids) == 1  # its slot is free again


async def test_an_echo_without_logprobs_is_the_prompt_as_sent() -> None:
    async with running() as backend:
        text, ids, _ = await collect(backend, ask("né", max_tokens=2, echo=True, ignore_eos=True))
        again, _, _ = await collect(
            backend, ask(tuple("né".encode()), max_tokens=2, echo=True, ignore_eos=True)
        )
    assert text == again and text.startswith("né") and ids[:3] == list("né".encode())
