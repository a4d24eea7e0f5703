"""POST /tokenize and /detokenize, in vLLM's form.

A relaying backend answers them itself. For any other backend, this process uses the tokenizer that
it has for it.
"""

import json
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from octet.errors import NeedsTokenizer, RequestError
from serve.api.operation import JSON, Answer, Call
from serve.api.relay import open_relay
from serve.api.schemas import MaybeMessages
from serve.api.text import plain_messages
from serve.api.unsupported import refuse_unsupported
from serve.backends.base import Backend, relays
from serve.engine.tokenizer import Tokenizer, beside

__all__ = ["Detokenize", "DetokenizeRequest", "Tokenize", "TokenizeRequest"]

MAX_CHARACTERS = 2**20  # of one text; tokenizing takes 0.2 KB of memory per token
MAX_TOKENS = 2**20


class TokenizeRequest(BaseModel):
    """A text, or a conversation."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    model: str
    prompt: str | None = None
    messages: MaybeMessages = None
    add_special_tokens: bool | None = None  # true for a text, false for a conversation
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: give either prompt or messages")
        return self


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    model: str
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**63)]], Field(max_length=MAX_TOKENS)]


class _TokenOperation:
    """An `Operation` that uses a tokenizer and does not run the model."""

    runs_model = False

    def cost(self, body: Any, unlimited: int) -> tuple[int, int]:
        return 0, 0

    async def open(self, backend: Backend, call: Call) -> Answer:
        if relays(backend):
            return await open_relay(backend, call)
        tokenizer, body = _tokenizer_of(backend), call.body
        dialect = "completion" if getattr(body, "messages", None) is None else "chat"
        refuse_unsupported(body.model_extra or {}, type(body).model_fields, dialect, backend.name)
        content = await self._answer(backend, tokenizer, body)
        return Answer(200, {"content-type": JSON}, json.dumps(content).encode())

    async def _answer(self, backend: Backend, tokenizer: Tokenizer, body: Any) -> dict[str, Any]:
        """Returns the content of the answer, in vLLM's form."""
        raise NotImplementedError


class Tokenize(_TokenOperation):
    name = "tokenize"
    path = "/tokenize"
    schema: type[BaseModel] = TokenizeRequest

    async def _answer(self, backend: Backend, tokenizer: Tokenizer, body: Any) -> dict[str, Any]:
        size: int | None = _characters(body)
        if body.prompt is None:  # a chat template may make a much longer text of the messages
            size = None
        ids = await beside(_encode, tokenizer, body, backend.name, size=size)
        names = [tokenizer.inner.id_to_token(i) for i in ids] if body.return_token_strs else None
        return {
            "count": len(ids),
            "max_model_len": backend.context_length,
            "tokens": ids,
            "token_strs": names,
        }


class Detokenize(_TokenOperation):
    name = "detokenize"
    path = "/detokenize"
    schema: type[BaseModel] = DetokenizeRequest

    async def _answer(self, backend: Backend, tokenizer: Tokenizer, body: Any) -> dict[str, Any]:
        return {"prompt": await beside(_decode, tokenizer, body.tokens, size=len(body.tokens))}


def _tokenizer_of(backend: Backend) -> Tokenizer:
    if backend.tokenizer is None:
        raise NeedsTokenizer(
            f"{backend.name} has no tokenizer: give the backend one in the configuration",
            param="model",
            code="unsupported_operation",
        )
    return backend.tokenizer


def _encode(tokenizer: Tokenizer, body: TokenizeRequest, backend: str) -> list[int]:
    """Returns the token ids of a text, or of a conversation under the chat template."""
    if body.prompt is not None:
        return tokenizer.encode(
            body.prompt, add_special_tokens=body.add_special_tokens is not False
        )
    messages = plain_messages(body.messages, backend)
    if not body.add_special_tokens:
        return list(tokenizer.chat_prompt(messages))
    return tokenizer.encode(tokenizer.template.render(messages))


def _decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Decodes `ids` with special tokens spelled out, as vLLM does."""
    wrong = next((i for i in ids if i >= tokenizer.vocab_size), None)
    if wrong is not None:
        raise RequestError(
            f"token id {wrong}: this model's are 0 to {tokenizer.vocab_size - 1}", param="tokens"
        )
    return str(tokenizer.inner.decode(ids, skip_special_tokens=False))


def _characters(body: TokenizeRequest) -> int:
    """Counts the characters. Raises RequestError (413) if they are too many to tokenize here."""
    if body.prompt is not None:
        count = len(body.prompt)
    else:
        count = sum(len(json.dumps(message, ensure_ascii=False)) for message in body.messages)
    if count > MAX_CHARACTERS:
        raise RequestError(
            f"the text has {count} characters; at most {MAX_CHARACTERS} are tokenized here",
            status=413,
            param="messages" if body.prompt is None else "prompt",
            code="request_too_large",
        )
    return count
