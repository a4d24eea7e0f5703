"""Implements the part of the Kubernetes API that a prover needs: list, watch and patch pods.

The protocol: https://kubernetes.io/docs/reference/using-api/api-concepts/ (watches, resource
versions, 410 Gone, bookmarks) and https://kubernetes.io/docs/reference/kubernetes-api/ (pods). The
official Python client is not used: it is 126 MB of code for three requests of one resource.
"""

import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any, NoReturn, Self
from urllib.parse import quote

import aiohttp

from octet.errors import ConfigError, OctetError
from verify.kubernetes.cluster import Cluster

__all__ = ["GONE", "ApiError", "Pods"]

GONE = 410  # the events after a resource version are no longer kept: list again
WATCH_S = 290.0  # after which the server is asked to end a watch
_TIMEOUT_S = 15.0  # of any other request, and for a watch to end after `WATCH_S`
_PAGE = 250  # pods
_MAX_EVENT = 8 * 1024 * 1024  # bytes; etcd keeps no object over 1.5 MB
_MAX_PAGE = 128 * 1024 * 1024  # bytes


class ApiError(OctetError):
    """A refusal of the API server, or a failure to reach it (`status` 0)."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Pods:
    """The pods of one namespace that `selector` selects. `async with` opens and closes it."""

    def __init__(self, cluster: Cluster, namespace: str, selector: str) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.selector = selector
        self._path = f"/api/v1/namespaces/{quote(namespace, safe='')}"
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        tls = self.cluster.tls or True
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=tls),
            headers={"accept": "application/json", "user-agent": "octet"},
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def list(self) -> tuple[list[dict[str, Any]], str]:
        """Returns all pods, and the resource version to watch from. Raises ApiError."""
        found: list[dict[str, Any]] = []
        query = {"labelSelector": self.selector, "limit": str(_PAGE)}
        while True:
            page = await self._request("GET", "/pods", "cannot list pods", query)
            metadata = page.get("metadata") or {}
            found += [pod for pod in page.get("items") or () if isinstance(pod, dict)]
            if not metadata.get("continue"):
                return found, str(metadata.get("resourceVersion") or "")
            query["continue"] = str(metadata["continue"])

    async def missing_namespace(self) -> bool:
        """Decides whether the namespace does not exist; False if this may not be queried.

        A list of the pods of a namespace that does not exist is empty, without an error.
        """
        try:
            await self._request("GET", "", "")
        except ApiError as error:
            return error.status == 404
        return False

    async def watch(self, version: str) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
        """Yields (ADDED | MODIFIED | DELETED | BOOKMARK, object) for changes after `version`.

        Ends when the server ends it, which it does every few minutes. Raises ApiError; `GONE` if
        the pods have to be listed again.
        """
        query = {
            "watch": "1",
            "labelSelector": self.selector,
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": f"{WATCH_S:.0f}",
        }
        what = "cannot watch pods"
        try:
            # Not asyncio.timeout: it would cancel whatever the caller does between two events.
            async with self._send("GET", "/pods", query, total_s=WATCH_S + _TIMEOUT_S) as response:
                if response.status != 200:
                    self._refuse(what, response.status, await _body(response, _MAX_EVENT))
                async for line in _lines(response.content):
                    kind, pod = self._event(line, what)
                    yield kind, pod
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is one
            raise self._unreached(what, error) from None

    async def patch_status(self, name: str, patch: Mapping[str, Any]) -> dict[str, Any]:
        """Applies a strategic merge patch to a pod's status; returns the pod. Raises ApiError."""
        return await self._request(
            *("PATCH", f"/pods/{quote(name, safe='')}/status", f"cannot patch pod {name}"),
            {"fieldManager": "octet"},
            data=json.dumps(patch).encode(),
            kind="application/strategic-merge-patch+json",
        )

    def _event(self, line: bytes, what: str) -> tuple[str, dict[str, Any]]:
        try:
            event = json.loads(line)
            kind, pod = str(event["type"]), dict(event["object"])
        except (ValueError, TypeError, KeyError, RecursionError):
            raise ApiError(f"{self.cluster.url}: {what}: sent an invalid event") from None
        if kind == "ERROR":
            code = pod.get("code")
            self._refuse(what, code if type(code) is int else 500, line)
        return kind, pod

    async def _request(
        self,
        method: str,
        path: str,
        what: str,
        query: Mapping[str, str] | None = None,
        *,
        data: bytes | None = None,
        kind: str | None = None,
    ) -> dict[str, Any]:
        try:
            async with self._send(method, path, query or {}, data=data, kind=kind) as response:
                body = await _body(response, _MAX_PAGE)
        except (aiohttp.ClientError, OSError) as error:
            raise self._unreached(what, error) from None
        if response.status >= 300:
            self._refuse(what, response.status, body)
        try:
            return dict(json.loads(body))
        except (ValueError, TypeError, RecursionError):
            raise ApiError(f"{self.cluster.url}: {what}: the answer is no JSON object") from None

    def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        *,
        data: bytes | None = None,
        kind: str | None = None,
        total_s: float = _TIMEOUT_S,
    ) -> Any:
        assert self._session is not None
        headers = {} if kind is None else {"content-type": kind}
        try:
            token = self.cluster.token()
        except ConfigError as error:  # its file may be back for the next request
            raise ApiError(str(error)) from None
        if token:
            headers["authorization"] = f"Bearer {token}"
        return self._session.request(
            *(method, self.cluster.url + self._path + path),
            params=query,
            data=data,
            headers=headers,
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=total_s, sock_connect=_TIMEOUT_S),
        )

    def _unreached(self, what: str, error: Exception) -> ApiError:
        reason = "no answer in time" if isinstance(error, TimeoutError) else str(error)
        return ApiError(f"{self.cluster.url}: {what}: {reason or type(error).__name__}")

    def _refuse(self, what: str, status: int, body: bytes) -> NoReturn:
        """Raises ApiError with the server's own message, which names the verb and the resource."""
        try:
            answer = json.loads(body)
            message = str((answer.get("object") or answer)["message"])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            message = body[:200].decode(errors="replace").strip() or "no reason given"
        remedy = _REMEDIES.get(status, "")
        raise ApiError(f"{self.cluster.url}: {what}: {message} ({status}){remedy}", status)


_REMEDIES = {
    401: "; the token or certificate has expired, or belongs to another cluster",
    403: "; a Role needs list and watch of pods, and patch of pods/status, as in the Helm chart's",
}


async def _body(response: aiohttp.ClientResponse, limit: int) -> bytes:
    found = bytearray()
    async for piece in response.content.iter_any():
        found += piece
        if len(found) > limit:
            raise aiohttp.ClientPayloadError(f"an answer of over {limit:,} bytes")
    return bytes(found)


async def _lines(content: aiohttp.StreamReader) -> AsyncGenerator[bytes, None]:
    """Yields whole lines of at most `_MAX_EVENT` bytes."""
    rest = bytearray()
    async for piece in content.iter_any():
        rest += piece
        while (end := rest.find(b"\n")) >= 0:
            line = bytes(rest[:end])
            del rest[: end + 1]
            if line.strip():
                yield line
        if len(rest) > _MAX_EVENT:
            raise aiohttp.ClientPayloadError(f"an event of over {_MAX_EVENT:,} bytes")
