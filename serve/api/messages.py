"""Anthropic's POST /v1/messages and its count_tokens: relayed to a backend that has them."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, WithJsonSchema

from serve.admission.admission import prompt_tokens
from serve.api.named_events import MESSAGES
from serve.api.operation import Answer, Call
from serve.api.relay import open_relay, relaying
from serve.api.schemas import Limit
from serve.api.schemas import Messages as MessageList
from serve.backends.base import Backend

__all__ = ["CountTokens", "CountTokensRequest", "Messages", "MessagesRequest"]

_BLOCKS = {"type": "array", "items": {"type": "object"}}
_SYSTEM = {"anyOf": [{"type": "string"}, _BLOCKS, {"type": "null"}]}


def _system(value: Any) -> Any:
    """Checks that `system` is null, a text, or a list of blocks."""
    blocks = isinstance(value, list) and all(isinstance(block, dict) for block in value)
    if not (blocks or value is None or isinstance(value, str)):
        raise ValueError("should be a text, or a list of blocks")
    return value


class CountTokensRequest(BaseModel):
    """The fields that the gateway checks; the backend accepts or refuses all others."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    model: str
    messages: MessageList
    system: Annotated[Any, BeforeValidator(_system), WithJsonSchema(_SYSTEM)] = None
    tools: list[dict[str, Any]] | None = None


class MessagesRequest(CountTokensRequest):
    max_tokens: Limit
    stream: bool | None = None


class Messages:
    """POST /v1/messages, an `Operation`."""

    name = "chat"
    path = "/v1/messages"
    runs_model = True
    schema: type[BaseModel] = MessagesRequest

    def cost(self, body: MessagesRequest, unlimited: int) -> tuple[int, int]:
        system = {"content": body.system or ""}
        return prompt_tokens([system, *body.messages, *(body.tools or ())]), body.max_tokens

    async def open(self, backend: Backend, call: Call) -> Answer:
        return await open_relay(relaying(backend, self.path), call, MESSAGES)


class CountTokens:
    """POST /v1/messages/count_tokens, an `Operation` that does not run the model."""

    name = "count_tokens"
    path = "/v1/messages/count_tokens"
    runs_model = False
    schema: type[BaseModel] = CountTokensRequest

    def cost(self, body: CountTokensRequest, unlimited: int) -> tuple[int, int]:
        return 0, 0

    async def open(self, backend: Backend, call: Call) -> Answer:
        return await open_relay(relaying(backend, self.path), call)
