"""Tests that a server's fields of wrong types are reported as garbled, and nothing else fails."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from octet.errors import BackendError
from serve.backends.openai_completion import completion_events
from serve.engine.request import Delta, Finished


def stream(**changed: Any) -> bytes:
    """Two tokens and the usage; `changed` is put in the place of the fields of those names."""
    logprobs = {
        "tokens": changed.pop("tokens", ["token_id:5"]),
        "token_logprobs": changed.pop("token_logprobs", [-0.5]),
        "top_logprobs": changed.pop("top_logprobs", [{"token_id:5": -0.5, "token_id:6": -2.0}]),
    }
    usage = {
        "prompt_tokens": changed.pop("prompt_tokens", 3),
        "completion_tokens": changed.pop("completion_tokens", 1),
    }
    choice = {"text": "x", "token_ids": [5], "logprobs": logprobs, "finish_reason": "stop"}
    events = [{"choices": [choice | changed]}, {"choices": [], "usage": usage}]
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)


async def read(content: bytes) -> list[Delta | Finished]:
    async def pieces() -> AsyncIterator[bytes]:
        yield content

    return [event async for event in completion_events("vllm x", pieces(), 20)]


async def test_what_is_of_its_types_is_read() -> None:
    delta, end = await read(stream(token_logprobs=[-1]))
    assert isinstance(delta, Delta) and delta.logprobs is not None and isinstance(end, Finished)
    (position,) = delta.logprobs
    assert [(t.token_id, t.logprob) for t in position.top] == [(5, -0.5), (6, -2.0)]
    assert position.chosen.logprob == -1.0 and end.usage.prompt_tokens == 3


@pytest.mark.parametrize(
    "changed",
    [
        {"prompt_tokens": "3"},
        {"prompt_tokens": None},
        {"prompt_tokens": float("inf")},
        {"prompt_tokens": -3},
        {"completion_tokens": [1]},
        {"completion_tokens": {"a": 1}},
        {"token_ids": ["5"]},
        {"token_ids": [None]},
        {"token_ids": [5.5]},
        {"token_ids": [-5]},
        {"token_logprobs": ["-0.5"]},
        {"token_logprobs": [[-0.5]]},
        {"token_logprobs": [-(10**400)]},
        {"top_logprobs": [{"token_id:5": "-0.5"}]},
        {"top_logprobs": [{"token_id:5": [-0.5], "token_id:6": [-2.0]}]},
        {"top_logprobs": ["token_id:5"]},
        {"tokens": [5]},
        {"text": 5},
        {"text": ["x"]},
        {"finish_reason": ["stop"]},
    ],
    ids=lambda changed: next(iter(changed)),
)
async def test_what_is_not_is_garbled(changed: dict[str, Any]) -> None:
    with pytest.raises(BackendError) as error:
        await read(stream(**changed))
    assert error.value.kind == "garbled" and "its stream is not one of completions" in str(
        error.value
    )


async def test_nesting_without_end_is_garbled() -> None:
    with pytest.raises(BackendError, match="not one of completions"):
        await read(b'data: {"choices": ' + b"[" * 100_000 + b"\n\n")
