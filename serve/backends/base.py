"""The interface of a backend, as the gateway sees it."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from octet.errors import BackendError, BackendUnavailable
from serve.engine.request import Event, GenerateRequest

if TYPE_CHECKING:  # tokenizers is not needed where no backend has one
    from serve.engine.tokenizer import Tokenizer

__all__ = [
    "PROBE",
    "Backend",
    "Incarnation",
    "LoadReport",
    "Relay",
    "RelayingBackend",
    "sooner_or_later",
]

PROBE = "1"  # the prompt of a probe: a token or two in every vocabulary


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a server says of itself."""

    running: int  # requests
    waiting: int  # requests
    kv_usage: float | None  # of its KV cache, 0 to 1
    capacity_tokens: int | None  # that its KV cache holds


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One life of a server's model, from its loading on, as far as the server tells them apart."""

    settings: tuple[str, ...]  # what it serves: another one is another model
    started: float | None = None  # when the process did, in seconds since 1970
    counts: tuple[int, ...] = ()  # that only grow while it lives

    @property
    def tells(self) -> bool:
        """Whether another life of the same settings would be seen to be another."""
        return self.started is not None or bool(self.counts)

    def follows(self, before: "Incarnation") -> bool:
        """Whether it may be the same life as `before`, asked earlier."""
        same = (self.settings, self.started) == (before.settings, before.started)
        fewer = any(now < then for now, then in zip(self.counts, before.counts, strict=False))
        return same and len(self.counts) == len(before.counts) and not fewer


def sooner_or_later(error: BackendError, *, started: bool) -> BackendError:
    """`error`, as BackendUnavailable unless events had come: then another backend may be asked."""
    if started or isinstance(error, BackendUnavailable):
        return error
    return BackendUnavailable(str(error), kind=error.kind, retry_after_s=error.retry_after_s)


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

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """Zero or more Deltas, then one Finished. Closing the iterator cancels the request.

        RequestError and BackendUnavailable are raised before the first event only, any other
        BackendError after it only; both say their `kind`.
        """

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> str | tuple[int, ...]:
        """The prompt of a conversation, ending where the assistant's answer begins.

        Raises RequestError for messages that the model's chat template refuses, and for a backend
        that has no template to apply.
        """

    @property
    def tokenizer(self) -> "Tokenizer | None":
        """Its tokenizer, if this process has it; None where the server has its own."""

    async def load(self) -> LoadReport | None:
        """How busy it says it is; None if it does not say, or not now. Never raises."""

    async def probe(self) -> None:
        """Generates one token for real. Raises BackendError; the caller limits the time."""

    async def hold(self, reopened: Callable[[], None] = lambda: None) -> None:
        """Opens a connection that carries nothing, and returns when the server has ended it.

        A server that merely closes idle connections is reconnected to: `reopened` is called before
        each time, for who answers then may be another. Raises BackendUnavailable (refused) if no
        connection can be made. Of the embedded engine: returns when it stops.
        """

    async def incarnation(self) -> Incarnation | None:
        """Which life of which model answers; None if it does not say, or not now. Never raises."""


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
    def name(self) -> str: ...

    @property
    def served_name(self) -> str:
        """The model's name upstream: what `model` in a relayed body must say."""

    async def relay(self, path: str, body: bytes, headers: Mapping[str, str]) -> Relay:
        """POSTs `body` to any `path` of the server, once: trying again is the caller's affair.

        Any status is an answer. Raises BackendUnavailable if none came: refused, lost or garbled.
        Reading the body raises BackendError: lost or garbled.
        """
