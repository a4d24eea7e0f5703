"""The HTTP interface over the embedded engine: what OpenAI's own client and raw requests see."""

import json
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError

from tests.serve.conftest import Served


@pytest.fixture
async def client(embedded: Served):
    async with AsyncOpenAI(base_url=f"{embedded.url}/v1", api_key="none", max_retries=0) as client:
        yield client


GREEDY = {"model": "fake", "temperature": 0, "ignore_eos": True}
ASK = {"model": "fake", "temperature": 0, "extra_body": {"ignore_eos": True}}  # by the client


async def test_a_completion(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(**ASK, prompt="def f", max_tokens=8)
    assert answer.object == "text_completion" and answer.model == "fake"
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].text
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 8)
    assert answer.usage.total_tokens == 13


async def test_a_completion_has_16_tokens_at_most_unless_told(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(**ASK, prompt="x")
    assert answer.usage is not None and answer.usage.completion_tokens == 16


async def test_streaming_gives_the_same_text_and_the_exact_usage(client: AsyncOpenAI) -> None:
    whole = await client.completions.create(**ASK, prompt="abc", max_tokens=30)
    stream = await client.completions.create(
        **ASK, prompt="abc", max_tokens=30, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert "".join(c.choices[0].text for c in chunks[:-1]) == whole.choices[0].text
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert len({chunk.id for chunk in chunks}) == 1


async def test_a_stream_without_include_usage_has_none(embedded: Served) -> None:
    events = await embedded.events("/v1/completions", {**GREEDY, "prompt": "a", "max_tokens": 3})
    assert events[-1] == "[DONE]"
    assert all("usage" not in json.loads(event) for event in events[:-1])


async def test_a_chat(client: AsyncOpenAI) -> None:
    messages = [{"role": "user", "content": "hello"}]
    whole = await client.chat.completions.create(**ASK, messages=messages, max_tokens=20)
    message = whole.choices[0].message
    assert message.role == "assistant" and message.content
    stream = await client.chat.completions.create(
        **ASK, messages=messages, max_completion_tokens=20, stream=True
    )
    chunks = [chunk.choices[0] async for chunk in stream]
    assert chunks[0].delta.role == "assistant"
    assert "".join(c.delta.content or "" for c in chunks) == message.content
    assert chunks[-1].finish_reason == whole.choices[0].finish_reason


async def test_a_chat_runs_to_the_end_of_the_context_unless_told(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        **ASK, messages=[{"role": "user", "content": "hi"}]
    )
    assert answer.usage is not None and answer.usage.total_tokens == 512
    assert answer.choices[0].finish_reason == "length"


async def test_every_form_of_prompt(embedded: Served) -> None:
    async def texts(prompt: object) -> list[str]:
        body = {**GREEDY, "prompt": prompt, "max_tokens": 6}
        status, answer = await embedded.post("/v1/completions", body)
        assert status == 200, answer
        assert [choice["index"] for choice in answer["choices"]] == [*range(len(answer["choices"]))]
        return [choice["text"] for choice in answer["choices"]]

    (first,), (second,) = await texts("ab"), await texts("cd")
    assert await texts(["ab", "cd"]) == [first, second]
    assert await texts([97, 98]) == [first]
    assert await texts([[97, 98], [99, 100]]) == [first, second]


async def test_n_choices_are_n_seeds(embedded: Served) -> None:
    async def texts(**fields: object) -> tuple[list[str], dict[str, int]]:
        body = {"model": "fake", "prompt": "ab", "max_tokens": 12, **fields}
        _, answer = await embedded.post("/v1/completions", body)
        return [choice["text"] for choice in answer["choices"]], answer["usage"]

    three, usage = await texts(n=3, seed=7)
    alone = [(await texts(seed=seed))[0][0] for seed in (7, 8, 9)]
    assert three == alone and len(set(three)) > 1
    assert usage["prompt_tokens"] == 2  # once, however many choices


async def test_streamed_choices_carry_their_index(embedded: Served) -> None:
    body = {"model": "fake", "prompt": ["ab", "cd"], "max_tokens": 9, "n": 2, "seed": 3}
    _, whole = await embedded.post("/v1/completions", body)
    options = {"stream_options": {"include_usage": True}}
    *events, done = await embedded.events("/v1/completions", body | options)
    texts, ends = [""] * 4, [None] * 4
    for event in map(json.loads, events[:-1]):
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
        ends[choice["index"]] = choice["finish_reason"] or ends[choice["index"]]
    assert done == "[DONE]"
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert ends == [choice["finish_reason"] for choice in whole["choices"]]
    assert json.loads(events[-1])["usage"] == whole["usage"]


async def test_logprobs_of_completions(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(**ASK, prompt="ab", max_tokens=5, logprobs=3)
    found = answer.choices[0].logprobs
    assert found is not None and found.tokens and found.top_logprobs and found.token_logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == 5
    assert all(logprob <= 0 for logprob in found.token_logprobs)
    for token, logprob, top in zip(
        found.tokens, found.token_logprobs, found.top_logprobs, strict=True
    ):
        assert len(top) == 3 and max(top.values()) == top[token] == logprob
    assert found.text_offset is not None and found.text_offset[0] == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_can_be_scored_without_an_answer(client: AsyncOpenAI, stream: bool) -> None:
    """The request of lm-evaluation-harness and other scoring clients."""
    asked = ASK | {"prompt": "ab", "max_tokens": 0, "echo": True, "logprobs": 1, "stream": stream}
    found: Any = await client.completions.create(**asked)
    choices = [c async for chunk in found for c in chunk.choices] if stream else found.choices
    assert "".join(choice.text for choice in choices) == "ab"
    assert choices[-1].finish_reason == "length"
    scores = choices[0].logprobs.token_logprobs
    assert scores[0] is None and len(scores) == 2 and scores[1] < 0
    if not stream:
        assert found.usage.completion_tokens == 0 and found.usage.prompt_tokens == 2


async def test_echo_puts_the_prompt_first(client: AsyncOpenAI) -> None:
    plain = await client.completions.create(**ASK, prompt="ab", max_tokens=4)
    echo = await client.completions.create(**ASK, prompt="ab", max_tokens=4, echo=True, logprobs=1)
    assert echo.choices[0].text == "ab" + plain.choices[0].text
    assert echo.usage == plain.usage
    found = echo.choices[0].logprobs
    assert found is not None and found.tokens is not None and found.tokens[:2] == ["a", "b"]
    assert found.token_logprobs is not None and found.token_logprobs[0] is None
    assert found.top_logprobs is not None and found.top_logprobs[0] is None


async def test_logprobs_of_chat(client: AsyncOpenAI) -> None:
    ask = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "logprobs": True}
    answer = await client.chat.completions.create(**ASK, **ask, top_logprobs=2)
    found = answer.choices[0].logprobs
    assert found is not None and found.content is not None and len(found.content) == 5
    for position in found.content:
        assert len(position.top_logprobs) == 2
        assert position.top_logprobs[0].token == position.token
        assert bytes(position.bytes or []).decode() == position.token
    bare = await client.chat.completions.create(**ASK, **ask)
    assert bare.choices[0].logprobs is not None and bare.choices[0].logprobs.content is not None
    assert all(position.top_logprobs == [] for position in bare.choices[0].logprobs.content)


async def test_tokens_are_named_by_id_on_request(embedded: Served) -> None:
    """What a proof needs: as texts, several tokens would be one key of `top_logprobs`."""
    named = {"return_tokens_as_token_ids": True}
    body = {**GREEDY, "prompt": "hello", "max_tokens": 5, "logprobs": 20}
    _, answer = await embedded.post("/v1/completions", body | named)
    logprobs = answer["choices"][0]["logprobs"]
    for chosen, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        ids = [int(name.removeprefix("token_id:")) for name in top]
        assert chosen in top and len(set(ids)) == len(ids) >= 20
    _, plain = await embedded.post("/v1/completions", body)
    assert plain["choices"][0]["text"] == answer["choices"][0]["text"]
    assert plain["choices"][0]["logprobs"]["token_logprobs"] == logprobs["token_logprobs"]


async def test_streamed_logprobs_are_those_of_the_whole_answer(embedded: Served) -> None:
    body = {**GREEDY, "prompt": "ab", "max_tokens": 12, "logprobs": 2}
    _, whole = await embedded.post("/v1/completions", body)
    collected: dict[str, list[object]] = {}
    for event in (await embedded.events("/v1/completions", body))[:-1]:
        for name, values in (json.loads(event)["choices"][0]["logprobs"] or {}).items():
            collected.setdefault(name, []).extend(values)
    assert collected == whole["choices"][0]["logprobs"]


async def test_tokens_that_are_half_a_character_are_told_apart(embedded: Served) -> None:
    body = {**GREEDY, "prompt": [97, 0xC3], "max_tokens": 1, "logprobs": 20}
    _, answer = await embedded.post("/v1/completions", body)
    found = answer["choices"][0]["logprobs"]
    assert found["tokens"][0].startswith("bytes:\\x")
    assert len(found["top_logprobs"][0]) == 20


async def test_models(client: AsyncOpenAI, embedded: Served) -> None:
    assert [model.id async for model in await client.models.list()] == ["fake"]
    model = await client.models.retrieve("fake")
    assert model.model_dump()["max_model_len"] == 512
    with pytest.raises(NotFoundError):
        await client.models.retrieve("nope")


async def test_health_and_ready(embedded: Served) -> None:
    async with embedded.session.get("/health") as response:
        assert response.status == 200
    async with embedded.session.get("/ready") as response:
        assert response.status == 200
        ready = await response.json()
    (backend,) = ready["models"]["fake"]
    assert (backend["backend"], backend["ready"]) == ("fake-1", True)


async def test_the_client_raises_on_errors(client: AsyncOpenAI) -> None:
    with pytest.raises(BadRequestError) as refused:
        await client.completions.create(model="fake", prompt="a", max_tokens=0)
    assert refused.value.param == "max_tokens"
    with pytest.raises(NotFoundError) as unknown:
        await client.completions.create(model="fakes", prompt="a")
    assert unknown.value.code == "model_not_found" and "did you mean 'fake'" in str(unknown.value)
