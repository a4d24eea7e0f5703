"""The bodies of answers, for the OpenAPI document. A relaying backend may add fields."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

__all__ = [
    "AnthropicErrorObject",
    "ChatCompletion",
    "Completion",
    "CountedTokens",
    "Detokenized",
    "EmbeddingList",
    "ErrorObject",
    "Message",
    "Model",
    "ModelList",
    "Readiness",
    "Response",
    "Tokenized",
]


class _Answer(BaseModel):
    model_config = ConfigDict(extra="allow")


class Error(BaseModel):
    """`param` is the field at fault, `code` for programs."""

    message: str
    type: str
    param: str | None
    code: str | int | None


class ErrorObject(_Answer):
    error: Error


class AnthropicError(BaseModel):
    type: str
    message: str


class AnthropicErrorObject(BaseModel):
    type: Literal["error"]
    error: AnthropicError


class Usage(_Answer):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int | None = None


class CompletionLogprobs(_Answer):
    """Parallel lists over the tokens."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None] | None
    text_offset: list[int]


class CompletionChoice(_Answer):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None
    stop_reason: str | int | None = None


class Completion(_Answer):
    """Also each event of a stream; the last one may have usage and no choice."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ChatMessage(_Answer):
    role: str
    content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatChoice(_Answer):
    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None
    stop_reason: str | int | None = None


class ChatCompletion(_Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None


class InputOutputUsage(_Answer):
    input_tokens: int
    output_tokens: int


class Response(_Answer):
    """`output` has messages, reasoning and calls of functions."""

    id: str
    object: Literal["response"]
    created_at: float
    model: str
    status: str
    output: list[dict[str, Any]]
    usage: InputOutputUsage | None = None


class Message(_Answer):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str
    stop_sequence: str | None = None
    usage: InputOutputUsage


class CountedTokens(_Answer):
    input_tokens: int


class Embedding(_Answer):
    index: int
    object: Literal["embedding"]
    embedding: list[float] | str  # a string is base64, of float32


class EmbeddingList(_Answer):
    object: Literal["list"]
    model: str | None = None
    data: list[Embedding]
    usage: Usage


class Tokenized(_Answer):
    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str | None] | None = None


class Detokenized(_Answer):
    prompt: str


class Model(_Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None = None


class ModelList(_Answer):
    object: Literal["list"]
    data: list[Model]


class Readiness(_Answer):
    ready: bool
    draining: bool
    models: dict[str, Any]
