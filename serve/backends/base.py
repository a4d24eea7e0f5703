"""Defines the interface between the gateway and a backend."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, runtime_checkable

from octet.errors import BackendError, BackendUnavailable
from serve.engine.request import Event, GenerateRequest

if TYPE_CHECKING:  # tokenizers is not needed where no backend has one
    from serve.engine.tokenizer import Tokenizer

__all__ = [
    "PROBE",
    "Backend",
    "Body",
    "Incarnation",
    "LoadReport",
    "Relay",
    "RelayingBackend",
    "generate_one_token",
    "relays",
    "sooner_or_later",
    "supervised",
]

PROBE = "1"  # the prompt of a probe: a token or two in every vocabulary


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Load that a server reports."""

    running: int  # requests
    waiting: int  # requests
    kv_usage: float | None  # used part of its KV cache, 0 to 1
    capacity_tokens: int | None  # tokens that its KV cache holds


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One process lifetime of a backend's model, as far as the server lets it be identified."""

    settings: tuple[str, ...]  # identify the model: other settings are another model
    started: float | None = None  # start of the process, in seconds since 1970
    counts: tuple[int, ...] = ()  # counters that only grow within an incarnation

    @property
    def shows_restarts(self) -> bool:
        """Decides whether a restart with the same settings can be detected."""
        return self.started is not None or bool(self.counts)

    def follows(self, before: "Incarnation") -> bool:
        """Decides whether this can be the same incarnation as `before`, which was read earlier."""
        same = (self.settings, self.started) == (before.settings, before.started)
        fewer = any(now < then for now, then in zip(self.counts, before.counts, strict=False))
        return same and len(self.counts) == len(before.counts) and not fewer


async def generate_one_token(backend: "Backend", model: str) -> None:
    """Sends a probe as a request for one token. Raises what the backend raises."""
    request = GenerateRequest(
        request_id="probe", model=model, prompt=PROBE, max_tokens=1, temperature=0.0
    )
    async with aclosing(backend.generate(request)) as events:
        async for _ in events:
            pass


def sooner_or_later(error: BackendError, *, started: bool) -> BackendError:
    """Returns `error`, as BackendUnavailable unless `started`: another backend may be tried."""
    if started or isinstance(error, BackendUnavailable):
        return error
    return BackendUnavailable(str(error), kind=error.kind, retry_after_s=error.retry_after_s)


class Backend(Protocol):
    """A server of one or more models, in this process or remote."""

    @property
    def name(self) -> str: ...

    @property
    def models(self) -> tuple[str, ...]:
        """The model names that it serves; known after `start`."""

    @property
    def context_length(self) -> int | None:
        """Tokens of prompt and answer together; None if the backend does not report it."""

    @property
    def accepts_extra(self) -> bool:
        """True if `GenerateRequest.extra` may hold fields."""

    async def start(self) -> None:
        """Connects or loads. Raises an OctetError if the backend can never work as configured."""

    async def close(self) -> None:
        """Releases everything; running requests fail with BackendError. Drain first."""

    async def ready(self) -> bool:
        """Checks whether a request sent now would be served. Never raises."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """Yields zero or more Deltas, then one Finished. Closing the iterator cancels the request.

        Raises RequestError and BackendUnavailable only before the first event, any other
        BackendError only after it. A BackendError has its `kind`.
        """

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> str | tuple[int, ...]:
        """Returns the prompt of a conversation, ending where the assistant's answer begins.

        Raises RequestError for messages that the model's chat template refuses, and for a backend
        that has no template to apply.
        """

    @property
    def tokenizer(self) -> "Tokenizer | None":
        """Its tokenizer, if this process has it; None where the server has its own."""

    async def load(self) -> LoadReport | None:
        """Returns the load that it reports; None if it reports none, or fails to. Never raises."""

    async def probe(self) -> None:
        """Generates one token. Raises BackendError; the caller limits the time."""

    async def hold(self, reopened: Callable[[], None] = lambda: None) -> None:
        """Holds an idle connection open, and returns when the server has gone.

        Reconnects to a server that merely closes idle connections. `reopened` is called before
        each reconnection, because another incarnation may answer then. Raises BackendUnavailable
        (refused) if no connection can be made. For the embedded engine, returns when it stops.
        """

    async def incarnation(self) -> Incarnation | None:
        """Identifies the incarnation that answers; None if that is unknown. Never raises."""


@runtime_checkable
class Body(Protocol):
    """The bytes of a response as they come. Closing it early cancels the request."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...
    async def __anext__(self) -> bytes: ...
    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Relay:
    """The backend's response, as bytes. Closing `body` cancels the request to the backend."""

    status: int
    headers: Mapping[str, str]
    body: AsyncIterator[bytes]


class RelayingBackend(Protocol):
    """A backend that speaks OpenAI's protocol itself, so that bytes pass through unread."""

    @property
    def name(self) -> str: ...

    @property
    def served_name(self) -> str:
        """The model's name on the server: the value of `model` in a relayed body."""

    async def relay(self, path: str, body: bytes, headers: Mapping[str, str]) -> Relay:
        """POSTs `body` to any `path` of the server, once; retries are up to the caller.

        Returns a response of any status. Raises BackendUnavailable if none came: refused, lost or
        garbled. Reading the body raises BackendError: lost or garbled.
        """


class SupervisedBackend(Protocol):
    """A backend whose process this one starts, and starts again when it ends."""

    @property
    def gave_up(self) -> str:
        """Returns why another start is unlikely to help; "" while it may."""

    @property
    def process(self) -> dict[str, Any]:
        """Describes the process, for administrators."""


def supervised(backend: Backend) -> TypeGuard[SupervisedBackend]:
    """Decides whether `backend` is a SupervisedBackend."""
    return hasattr(backend, "gave_up")


def relays(backend: Backend) -> TypeGuard[RelayingBackend]:
    """Decides whether `backend` is a RelayingBackend. `isinstance` of a protocol is too slow."""
    return hasattr(backend, "relay")
