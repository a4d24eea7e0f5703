"""POST /v1/embeddings: relayed to a backend that serves embeddings."""

from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from octet.errors import UnsupportedField
from serve.admission.admission import prompt_tokens
from serve.api.operation import Answer, Call
from serve.api.relay import open_relay
from serve.api.schemas import PROMPT_SCHEMA, MaybeMessages, prompts_of
from serve.backends.base import Backend, relays

__all__ = ["EmbeddingRequest", "Embeddings"]

MAX_INPUTS = 2048  # OpenAI's limit


def _inputs(value: Any) -> Any:
    """Accepts the forms of a completion's `prompt`, and conversations, as vLLM does."""
    if value is None:
        return None
    if isinstance(value, list) and value and isinstance(value[0], dict | list) and value[0]:
        first = value[0] if isinstance(value[0], dict) else value[0][0]
        if isinstance(first, dict):
            return tuple(value)
    inputs = prompts_of(value)
    if len(inputs) > MAX_INPUTS:
        raise ValueError(f"at most {MAX_INPUTS} inputs are allowed, got {len(inputs)}")
    return inputs


_INPUT: dict[str, Any] = {"anyOf": [PROMPT_SCHEMA, {"type": "null"}]}


class EmbeddingRequest(BaseModel):
    """The fields that the gateway checks; the backend accepts or refuses all others."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    model: str
    input: Annotated[Any, BeforeValidator(_inputs), WithJsonSchema(_INPUT)] = None
    messages: MaybeMessages = None  # vLLM's addition, for multimodal models
    encoding_format: str | None = None
    dimensions: Annotated[int, Field(gt=0, lt=2**31)] | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.input is None) == (self.messages is None):
            raise ValueError("input: give either input or messages")
        return self


class Embeddings:
    """POST /v1/embeddings, an `Operation` whose answer has no generated tokens."""

    name = "embeddings"
    path = "/v1/embeddings"
    runs_model = True
    schema: type[BaseModel] = EmbeddingRequest

    def cost(self, body: EmbeddingRequest, unlimited: int) -> tuple[int, int]:
        return prompt_tokens(body.messages if body.input is None else body.input), 0

    async def open(self, backend: Backend, call: Call) -> Answer:
        if not relays(backend):
            raise UnsupportedField(
                f"{backend.name} has no embeddings", param="model", code="unsupported_operation"
            )
        return await open_relay(backend, call)
