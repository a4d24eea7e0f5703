"""What a POST path does: the interface of an operation.

One request, checked: what the operation and the backends need of it.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import BaseModel

from serve.api.answer import Answer
from serve.backends.base import Backend
from serve.routing.route import Route

__all__ = ["Call", "Operation"]


@dataclass(frozen=True, slots=True)
class Call:
    """`body` is the checked form of `data`, which is the decoded form of `raw`."""

    id: str
    path: str
    raw: bytes
    data: dict[str, Any]
    body: Any
    route: Route
    headers: dict[str, str] = field(default_factory=dict)  # to send on: request id, traceparent
    streamed: bool = False  # the client asked for events, of an operation that has them

    @property
    def model(self) -> str:
        """The name that the client used: an alias is answered under itself."""
        model: str = self.data.get("model") or self.route.name
        return model


class Operation(Protocol):
    """One POST path. Instances have no state of a request's."""

    @property
    def name(self) -> str:
        """OpenTelemetry's `gen_ai.operation.name`."""

    @property
    def path(self) -> str: ...

    @property
    def runs_model(self) -> bool:
        """Whether an answer shows that the model works: else a server gives it with a dead one."""

    @property
    def schema(self) -> type[BaseModel]:
        """Of the body; its `model` names what is asked for."""

    def cost(self, body: Any, unlimited: int) -> tuple[int, int]:
        """Tokens of the prompt, estimated, and of the longest answer (all choices together).

        A choice whose length the body does not limit counts `unlimited` tokens.
        """

    async def open(self, backend: Backend, call: Call) -> Answer:
        """Asks `backend`, and waits for the first event, or for the whole body if not streamed.

        Raises BackendError if the backend fails before that, UnsupportedField if another one
        may take the request, RequestError if none would. What was opened is closed if it raises or
        is cancelled.
        """
