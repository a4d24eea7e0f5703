"""Answers written from a backend's events: the lists of log-probabilities keep to the text."""

import json
from typing import Any

from serve.api.schemas import ChatRequest, CompletionRequest, validate
from serve.api.text import Chats, Completions, open_generate, requests_of
from serve.config import Limits
from tests.fakes import fake_backend, opened

ASK = {"model": "fake", "prompt": "ab", "temperature": 0, "max_tokens": 24, "logprobs": 1}


async def choices(**fields: Any) -> list[dict[str, Any]]:
    """Of each chunk that has one, or of the whole answer."""
    body = validate(CompletionRequest, ASK | fields, Limits())
    async with opened(fake_backend()) as backend:
        requests = requests_of(body, body.prompt, "id")
        answer = await open_generate(backend, Completions(), body, requests)
        pieces = [answer.first]
        if answer.rest is not None:
            pieces += [piece async for piece in answer.rest]
    events = b"".join(pieces).split(b"\n\n") if body.stream else pieces
    texts = [event.removeprefix(b"data: ") for event in events if event.strip()]
    found = [json.loads(text) for text in texts if text != b"[DONE]"]
    return [choice for chunk in found for choice in chunk["choices"]]


async def test_a_stop_string_ends_the_lists_where_it_ends_the_text() -> None:
    (free,) = await choices()
    text = free["text"]
    stop = text[6:9]
    assert text.find(stop) == 6
    for streamed in (False, True):
        parts = await choices(stop=stop, stream=streamed)
        assert "".join(part["text"] for part in parts) == text[:6]
        lists = [part["logprobs"] for part in parts if part["logprobs"]]
        tokens = [token for found in lists for token in found["tokens"]]
        offsets = [offset for found in lists for offset in found["text_offset"]]
        assert tokens == free["logprobs"]["tokens"][: len(tokens)]
        assert "".join(tokens) == text[:6]
        assert offsets == free["logprobs"]["text_offset"][: len(tokens)]
        assert parts[-1]["finish_reason"] == "stop" and parts[-1]["stop_reason"] == stop


async def test_a_stop_string_that_never_comes_changes_nothing() -> None:
    (free,) = await choices()
    (kept,) = await choices(stop="\u2603")
    assert kept == free
    parts = await choices(stop=[free["text"][-1] + "\u2603"], stream=True)
    tokens = [t for part in parts if part["logprobs"] for t in part["logprobs"]["tokens"]]
    assert tokens == free["logprobs"]["tokens"]


async def test_chat_ends_its_list_there_too() -> None:
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "fake", "messages": messages, "temperature": 0, "max_tokens": 20}
    async with opened(fake_backend()) as backend:
        free = await _chat(backend, body)
        text = free["message"]["content"]
        ended = await _chat(backend, body | {"stop": text[5:8]})
    assert ended["message"]["content"] == text[: text.find(text[5:8])]
    tokens = [entry["token"] for entry in ended["logprobs"]["content"]]
    assert "".join(tokens) == ended["message"]["content"]


async def _chat(backend: Any, body: dict[str, Any]) -> dict[str, Any]:
    checked = validate(ChatRequest, body | {"logprobs": True}, Limits())
    prompts = [backend.chat_prompt(body["messages"])]
    requests = requests_of(checked, prompts, "id")
    answer = await open_generate(backend, Chats(), checked, requests)
    choice: dict[str, Any] = json.loads(answer.first)["choices"][0]
    return choice
