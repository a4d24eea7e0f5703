"""The interface of an operation, which answers one POST path.

A `Call` is one checked request, as the operation and the backends need it.
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
    headers: dict[str, str] = field(default_factory=dict)  # to forward: request id, traceparent
    streamed: bool = False  # the client requested events, and the operation has them

    @property
    def model(self) -> str:
        """The name that the client used: a request for an alias is answered with the alias."""
        model: str = self.data.get("model") or self.route.name
        return model


class Operation(Protocol):
    """One POST path. Instances hold no state of a request."""

    @property
    def name(self) -> str:
        """OpenTelemetry's `gen_ai.operation.name`."""

    @property
    def path(self) -> str: ...

    @property
    def runs_model(self) -> bool:
        """True if an answer proves that the model works; false if a server answers without it."""

    @property
    def schema(self) -> type[BaseModel]:
        """The schema of the body; its `model` field names the requested model."""

    def cost(self, body: Any, unlimited: int) -> tuple[int, int]:
        """Returns the prompt's estimated tokens and the longest answer's (all choices together).

        A choice whose length the body does not limit counts `unlimited` tokens.
        """

    async def open(self, backend: Backend, call: Call) -> Answer:
        """Sends the request, and waits for the first event, or for the whole body if not streamed.

        Raises BackendError if the backend fails before that, UnsupportedField if another backend
        may accept the request, RequestError if none would. If it raises or is cancelled, it closes
        everything that it opened.
        """
