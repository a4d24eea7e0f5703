"""What a POST path does: the interface of an operation."""

from typing import Any, Protocol

from pydantic import BaseModel

from serve.api.answer import Answer
from serve.api.call import Call
from serve.backends.base import Backend

__all__ = ["Operation"]


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
