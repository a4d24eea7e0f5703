"""The operations that generate text: completions and chats."""

import asyncio
from collections.abc import Sequence
from typing import Any, TypeAlias

from pydantic import BaseModel

from serve.admission.estimate import prompt_tokens
from serve.api.answer import Answer
from serve.api.chat import ChatDialect, plain_messages
from serve.api.completions import CompletionDialect
from serve.api.generate import open_generate, requests_of
from serve.api.operation import Call
from serve.api.relay import open_relay, relays
from serve.api.schemas import ChatRequest, CompletionRequest
from serve.api.unsupported import refuse_unsupported
from serve.backends.base import Backend

__all__ = ["Chats", "Completions"]

LONG_TEXT = 20_000  # characters; more take milliseconds to tokenize, so on a thread
Prompts: TypeAlias = Sequence[str | tuple[int, ...]]


class Completions:
    """POST /v1/completions. An `Operation`."""

    name = "text_completion"
    path = "/v1/completions"
    runs_model = True
    schema: type[BaseModel] = CompletionRequest

    def cost(self, body: CompletionRequest, unlimited: int) -> tuple[int, int]:
        choices = len(body.prompt) * (body.n or 1)
        return prompt_tokens(body.prompt), choices * body.answer_limit

    async def open(self, backend: Backend, call: Call) -> Answer:
        if relays(backend):
            return await open_relay(backend, call)
        body: CompletionRequest = call.body
        refuse_unsupported(_extra(body), type(body).model_fields, "completion", backend.name)
        requests = requests_of(body, body.prompt, call.id, call.headers)
        return await open_generate(backend, CompletionDialect(), body, requests)


class Chats:
    """POST /v1/chat/completions. An `Operation`."""

    name = "chat"
    path = "/v1/chat/completions"
    runs_model = True
    schema: type[BaseModel] = ChatRequest

    def cost(self, body: ChatRequest, unlimited: int) -> tuple[int, int]:
        answer = body.answer_limit or unlimited
        return prompt_tokens(body.messages), (body.n or 1) * answer

    async def open(self, backend: Backend, call: Call) -> Answer:
        if relays(backend):
            return await open_relay(backend, call)
        body: ChatRequest = call.body
        refuse_unsupported(_extra(body), type(body).model_fields, "chat", backend.name)
        requests = requests_of(body, await _prompts(body, backend), call.id, call.headers)
        return await open_generate(backend, ChatDialect(), body, requests)


async def _prompts(body: ChatRequest, backend: Backend) -> Prompts:
    messages = plain_messages(body.messages, backend.name)
    if sum(len(message["content"]) for message in messages) < LONG_TEXT:
        return [backend.chat_prompt(messages)]
    return [await asyncio.to_thread(backend.chat_prompt, messages)]


def _extra(body: BaseModel) -> dict[str, Any]:
    return body.model_extra or {}
