"""Checks that a server, or a gateway before it, has Responses and Messages, with official clients.

    for check in CHECKS:
        await check("http://127.0.0.1:8000", "model", "def f(x):")

A prompt of 3000 characters, repeated, is beyond the model's context.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import openai
import pytest

anthropic: Any = pytest.importorskip("anthropic", reason="no anthropic: run `make setup`")

__all__ = ["CHECKS", "Check", "anthropic", "messages_client", "responses_client"]

SETTINGS: dict[str, Any] = {"max_output_tokens": 8, "temperature": 0}


def responses_client(url: str, key: str = "-") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def messages_client(url: str, key: str = "-") -> Any:
    return anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0)


async def a_response_is_the_same_streamed(url: str, model: str, prompt: str) -> None:
    async with responses_client(url) as client:
        whole = await client.responses.create(model=model, input=prompt, **SETTINGS)
        stream = await client.responses.create(model=model, input=prompt, stream=True, **SETTINGS)
        events: list[Any] = [event async for event in stream]
    assert whole.output_text and whole.model == model and whole.usage is not None
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    last = events[-1].response
    assert "".join(deltas) == last.output_text == whole.output_text
    assert events[0].response.model == last.model == model
    for name in ("input_tokens", "output_tokens", "total_tokens"):
        assert getattr(last.usage, name) == getattr(whole.usage, name) > 0


async def a_response_follows_instructions_and_items(url: str, model: str, prompt: str) -> None:
    items: Any = [{"role": "user", "content": [{"type": "input_text", "text": prompt}]}]
    async with responses_client(url) as client:
        alone = await client.responses.create(model=model, input=prompt, **SETTINGS)
        same = await client.responses.create(model=model, input=items, **SETTINGS)
        more = await client.responses.create(
            model=model, input=items, instructions="def g(y):\n", **SETTINGS
        )
    assert alone.usage and same.usage and more.usage
    assert same.output_text == alone.output_text
    assert more.usage.input_tokens > same.usage.input_tokens == alone.usage.input_tokens


async def a_message_is_the_same_streamed(url: str, model: str, prompt: str) -> None:
    body = {"model": model, "max_tokens": 8, "extra_body": {"temperature": 0}}
    said = [{"role": "user", "content": [{"type": "text", "text": prompt}]}]
    async with messages_client(url) as client:
        whole = await client.messages.create(**body, messages=said)
        stream = await client.messages.create(**body, messages=said, stream=True)
        events = [event async for event in stream]
        async with client.messages.stream(**body, messages=said) as helper:
            assembled = await helper.get_final_message()
        counted = await client.messages.count_tokens(model=model, messages=said)
    (block,) = whole.content
    assert block.text and whole.model == events[0].message.model == model
    assert (events[0].type, events[-1].type) == ("message_start", "message_stop")
    deltas = [event.delta.text for event in events if event.type == "content_block_delta"]
    assert "".join(deltas) == block.text == assembled.content[0].text
    (end,) = [event for event in events if event.type == "message_delta"]
    assert end.delta.stop_reason == whole.stop_reason == assembled.stop_reason
    assert end.usage.output_tokens == whole.usage.output_tokens > 0
    assert end.usage.input_tokens == whole.usage.input_tokens == counted.input_tokens > 0


async def a_prompt_beyond_the_context_is_a_mistake(url: str, model: str, prompt: str) -> None:
    long = prompt * (3000 // len(prompt))
    said = [{"role": "user", "content": long}]
    async with responses_client(url) as client, messages_client(url) as other:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.create(model=model, input=long, stream=stream, **SETTINGS)
            assert isinstance(refused.value.body, dict) and refused.value.body["message"]
            with pytest.raises(anthropic.BadRequestError) as told:
                await other.messages.create(model=model, max_tokens=8, messages=said, stream=stream)
            assert told.value.body["type"] == "error" and told.value.body["error"]["message"]


Check = Callable[[str, str, str], Awaitable[None]]
CHECKS: Sequence[Check] = (
    a_response_is_the_same_streamed,
    a_response_follows_instructions_and_items,
    a_message_is_the_same_streamed,
    a_prompt_beyond_the_context_is_a_mistake,
)
