"""All replicas of one engine as one backend: Ray chooses a replica for each request."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Self

from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException

from octet.errors import BackendError, BackendUnavailable
from serve.backends.base import Incarnation, LoadReport, Relay
from serve.backends.bounds import MAX_REPORT
from serve.backends.openai_http import ASIDE_TIMEOUT_S, OpenAiHttpBackend, card_of, context_length
from serve.config import HttpConfig

__all__ = ["RayBackend"]

_FAILED = (RayError, RayServeException)


class RayBackend(OpenAiHttpBackend):
    """Speaks OpenAI's protocol with `Engine.answer` through a handle of Ray Serve, without HTTP.

    A request whose replica ends is lost, and the gateway sends it again if it had no token; Ray
    then chooses another replica. Requests wait in the handle while there is no replica.
    """

    def __init__(self, model: str, deployment: str, handle: Any) -> None:
        """`model` is the name that the engine's replicas serve."""
        super().__init__(model, HttpConfig(type="openai", url="http://ray"))
        self.name = f"ray {deployment}"
        self._answer = handle.options(stream=True).answer

    async def start(self) -> None:
        """Does nothing: Ray starts the replicas."""

    async def close(self) -> None:
        """Does nothing: Ray ends the replicas."""

    async def ready(self) -> bool:
        """Waits for the first replica; from then on, requests may always be left to Ray."""
        if self.context_length is None:
            status, body = await self.get("/v1/models")
            self.context_length = context_length(card_of(body, self.served_name) or {})
            return status == 200
        return True

    async def load(self) -> LoadReport | None:
        """Returns None: the replicas report their loads to Ray."""
        return None

    async def hold(self, reopened: Callable[[], None] = lambda: None) -> None:
        """Never returns: replicas come and go, and Ray knows which there are."""
        await asyncio.Event().wait()

    async def incarnation(self) -> Incarnation | None:
        """Returns None: each replica detects by itself that its engine was restarted."""
        return None

    async def relay(self, path: str, body: bytes, headers: Mapping[str, str]) -> Relay:
        return await self._send("POST", path, body, headers)

    async def get(self, path: str) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(ASIDE_TIMEOUT_S):
                relay = await self._send("GET", path, b"", {})
                return relay.status, await self._report(relay, MAX_REPORT)
        except (BackendError, TimeoutError):
            return 0, b""

    async def _send(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Relay:
        response = self._answer.remote(method, path, body, dict(headers))
        try:
            status, lowered = await anext(response)
        except BackPressureError as error:
            raise BackendUnavailable(f"{self.name}: {error}", kind="overloaded") from None
        except _FAILED as error:
            line = f"{self.name}: the replica did not answer ({type(error).__name__})"
            raise BackendUnavailable(line, kind="lost") from error
        except BaseException:
            response.cancel()
            raise
        return Relay(status, lowered, _Body(self.name, response))


class _Body:
    """The bytes of a replica's answer as they come. Closing it early cancels the request there."""

    def __init__(self, name: str, response: Any) -> None:
        self._name = name
        self._response = response
        self._pieces: AsyncIterator[bytes] = aiter(response)
        self._open = True

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        try:
            return await anext(self._pieces)
        except StopAsyncIteration:
            self._open = False
            raise
        except _FAILED as error:
            self._open = False
            line = f"{self._name}: the replica ended while answering ({type(error).__name__})"
            raise BackendError(line, kind="lost") from error

    async def aclose(self) -> None:
        if self._open:
            self._open = False
            self._response.cancel()
