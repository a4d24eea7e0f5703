"""The interface of a backend, as the gateway sees it."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from serve.types import Event, GenerateRequest

__all__ = ["Backend", "Relay", "RelayingBackend"]


class Backend(Protocol):
    """A server, near or far, of one or more models."""

    @property
    def name(self) -> str: ...

    @property
    def models(self) -> tuple[str, ...]:
        """The model names it answers to; known after `start`."""

    @property
    def context_length(self) -> int | None:
        """Tokens of prompt and answer together; None if the backend does not say."""

    @property
    def accepts_extra(self) -> bool:
        """Whether `GenerateRequest.extra` may hold anything."""

    async def start(self) -> None:
        """Connects or loads. Raises an OctetError if the backend can never work as configured."""

    async def close(self) -> None:
        """Lets go of everything; running requests fail with BackendError. Drain before."""

    async def ready(self) -> bool:
        """Whether a request sent now would be served. Never raises."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[Event]:
        """Zero or more Deltas, then one Finished. Closing the iterator cancels the request.

        What refuses a request (RequestError, BackendUnavailable) is raised before the first event;
        BackendError may come at any time.
        """

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> str | tuple[int, ...]:
        """The prompt of a conversation, ending where the assistant's answer begins.

        Raises RequestError for messages that the model's chat template refuses, and for a backend
        that has no template to apply.
        """


@dataclass(frozen=True, slots=True)
class Relay:
    """An upstream's answer, as bytes. Closing `body` cancels the upstream request."""

    status: int
    headers: Mapping[str, str]
    body: AsyncIterator[bytes]


@runtime_checkable
class RelayingBackend(Protocol):
    """A backend that speaks OpenAI's protocol itself, so that bytes pass through unread."""

    @property
    def served_name(self) -> str:
        """The model's name upstream: what `model` in a relayed body must say."""

    async def relay(self, path: str, body: bytes, headers: Mapping[str, str]) -> Relay:
        """Sends `body` to `path`. Raises BackendUnavailable if nothing was sent."""
