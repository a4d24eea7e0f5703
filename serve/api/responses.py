"""POST /v1/responses: relayed to a backend that has it, as a request that leaves no state behind.

OpenAI's own service stores responses, and later requests continue them. Here any of several
backends may get the next request, so requests that need a stored response are refused, and
backends get `store: false`.
"""

from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, WithJsonSchema, model_validator

from serve.admission.admission import prompt_tokens
from serve.api.named_events import RESPONSES
from serve.api.operation import Answer, Call
from serve.api.relay import open_relay, relaying
from serve.api.schemas import Limit, Logprobs
from serve.backends.base import Backend

__all__ = ["Responses", "ResponsesRequest"]

_ITEMS = {"type": "array", "minItems": 1, "items": {"type": "object"}}
_INPUT = {"anyOf": [{"type": "string", "minLength": 1}, _ITEMS]}


def _input(value: Any) -> Any:
    items = isinstance(value, list) and all(isinstance(item, dict) for item in value)
    if not (items or isinstance(value, str)) or not value:
        raise ValueError("should be a text, or a list of at least one item")
    return value


class ResponsesRequest(BaseModel):
    """The fields that the gateway checks; the backend accepts or refuses all others."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    model: str
    input: Annotated[Any, BeforeValidator(_input), WithJsonSchema(_INPUT)]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    max_output_tokens: Limit | None = None
    top_logprobs: Logprobs | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None

    @model_validator(mode="after")
    def _without_state(self) -> Self:
        """Refuses a request that needs a stored response, or asks for one to be stored."""
        for name in ("previous_response_id", "conversation"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"{name}: no response is stored here, because the next request may go to"
                    " another backend; send the whole conversation in 'input'"
                )
        if self.background:
            raise ValueError("background: no response is stored here; use stream: true")
        if self.store:
            raise ValueError("store: no response is stored here; leave it out, or send false")
        return self


class Responses:
    """POST /v1/responses, an `Operation`."""

    name = "chat"
    path = "/v1/responses"
    runs_model = True
    schema: type[BaseModel] = ResponsesRequest

    def cost(self, body: ResponsesRequest, unlimited: int) -> tuple[int, int]:
        items = [body.input] if isinstance(body.input, str) else body.input
        prompt = prompt_tokens([body.instructions or "", *items, *(body.tools or ())])
        return prompt, body.max_output_tokens or unlimited

    async def open(self, backend: Backend, call: Call) -> Answer:
        # OpenAI's default is to store it, and some backends would.
        added = {"store": False}
        return await open_relay(relaying(backend, self.path), call, RESPONSES, added)
