"""Sends one JSON request to a server, and returns the answer or raises one error."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from octet.errors import BackendError, BackendUnavailable
from serve.backends.openai_errors import failure, lost_while_answering, no_answer

__all__ = ["Client"]

TRIES = 6  # of a request that a busy server refuses
LONGEST_PAUSE_S = 10.0  # between them
TIMEOUT_S = 600.0  # of one request
CONNECT_S = 5.0


class Client:
    """Requests to one base URL; an async context manager."""

    def __init__(self, url: str, key: str | None) -> None:
        self._url = url
        self._headers = {"user-agent": "octet"} | (
            {"authorization": f"Bearer {key}"} if key else {}
        )

    async def __aenter__(self) -> "Client":
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S, sock_connect=CONNECT_S)
        self._session = aiohttp.ClientSession(timeout=timeout, headers=self._headers)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Returns the JSON of a GET, or of a POST of `body`; retries a busy server after pauses.

        Raises RequestError for a refusal, BackendError for everything else.
        """
        for turn in range(TRIES):
            try:
                return await self._once(path, body)
            except BackendUnavailable as error:
                if error.kind != "overloaded" or turn == TRIES - 1:
                    raise
                await asyncio.sleep(min(error.retry_after_s or 2.0**turn, LONGEST_PAUSE_S))
        raise AssertionError("the last turn returns or raises")

    async def _once(self, path: str, body: Mapping[str, Any] | None) -> Any:
        try:
            response = await self._session.request(
                "GET" if body is None else "POST", self._url + path, json=body
            )
        except TimeoutError:
            raise BackendUnavailable(f"{self._url}: no answer", kind="timeout") from None
        except (aiohttp.ClientError, OSError) as error:
            raise no_answer(self._url, error) from error
        async with response:
            try:
                content = await response.read()
            except TimeoutError:
                raise BackendError(f"{self._url}: no whole answer", kind="timeout") from None
            except (aiohttp.ClientError, OSError) as error:
                raise lost_while_answering(self._url, error) from error
        if response.status != 200:
            headers = {name.lower(): value for name, value in response.headers.items()}
            raise failure(self._url, response.status, headers, content)
        try:
            return json.loads(content)
        except ValueError:
            raise BackendError(f"{self._url}{path}: not JSON", kind="garbled") from None
