"""A fake Kubernetes API server: pods, and who may do what with them, over its HTTP protocol.

Answers as https://kubernetes.io/docs/reference/using-api/api-concepts/ describes it, and as
kube-apiserver 1.20 was seen to: `tests/verify/kubernetes/contract.py` runs on both.
"""

import asyncio
import copy
import itertools
import json
import secrets
import uuid
from typing import Any

from aiohttp import web

__all__ = ["ADMIN", "FakeKubernetes"]

ADMIN = "admin-token"
_KEPT = 100  # events
Json = dict[str, Any]


class FakeKubernetes:
    """`gone`, `refused` and `hung_up` are the next requests of a kind that fail in that way."""

    def __init__(self) -> None:
        self.url = ""
        self.namespaces = {"default"}
        self.gone = 0  # watches that get 410, as an event
        self.hung_up = 0  # watches whose connection breaks
        self.unavailable = 0  # requests that get 503
        self.conflicts = 0  # patches by a prover that get 409
        self.watches: list[Json] = []  # the queries of all watches
        self.patches: list[Json] = []  # all patches of a status that were applied
        self.tokens: dict[str, tuple[str, str]] = {}  # of service accounts: namespace and name
        self._objects: dict[tuple[str, str, str], Json] = {}  # by kind, namespace and name
        self._events: list[tuple[int, str, Json]] = []
        self._versions = itertools.count(100)
        self._floor = 99  # watches from an earlier version are refused
        self._news = asyncio.Condition()

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def bookmark(self) -> None:
        """Sends every watch the present version."""
        await self._record("BOOKMARK", {"kind": "Pod", "metadata": {}})

    async def forget(self) -> None:
        """Forgets all events, as compaction does: watches from earlier versions are refused."""
        self._floor = self._version
        self._events.clear()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        user = self._user(request.headers.get("authorization", "").removeprefix("Bearer "))
        if user is None:
            return refusal(401, "Unauthorized", "Unauthorized")
        if self.unavailable:
            self.unavailable -= 1
            return refusal(503, "ServiceUnavailable", "the server is shutting down")
        group, namespace, kind, name, subresource = split(request.path)
        watching = request.query.get("watch") in ("1", "true")
        verb = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}.get(request.method, "get")
        if verb == "get" and not name:
            verb = "watch" if watching else "list"
        resource = f"{kind}/{subresource}" if subresource else kind
        if not self._allows(user, namespace, verb, resource):
            where = f' in API group "{group}" in the namespace "{namespace}"'
            what = f'{kind}{f" {json.dumps(name)}" if name else ""} is forbidden: User "{user}"'
            said = f'{what} cannot {verb} resource "{resource}"{where}'
            return refusal(403, "Forbidden", said)
        if kind == "namespaces":
            return self._namespace(verb, name or (await request.json())["metadata"]["name"])
        if subresource == "token":
            token = secrets.token_hex(16)
            self.tokens[token] = (namespace, name)
            return web.json_response({"status": {"token": token}}, status=201)
        if verb == "list":
            return self._list(request, namespace, kind)
        if verb == "watch":
            return await self._watch(request, namespace)
        if verb == "create":
            return await self._create(namespace, kind, await request.json())
        found = self._objects.get((kind, namespace, name))
        if found is None:
            return refusal(404, "NotFound", f'{kind} "{name}" not found')
        if verb == "patch":
            return await self._patch(found, await request.json(), subresource)
        if verb == "delete":
            del self._objects[kind, namespace, name]
            await self._changed("DELETED", found)
        return web.json_response(found)

    def _user(self, token: str) -> str | None:
        if token == ADMIN:
            return "admin"
        if token in self.tokens:
            return "system:serviceaccount:" + ":".join(self.tokens[token])
        return None

    def _allows(self, user: str, namespace: str, verb: str, resource: str) -> bool:
        if user == "admin":
            return True
        rules = []
        for (kind, where, _), bound in self._objects.items():
            subjects = [
                f"system:serviceaccount:{s.get('namespace', where)}:{s['name']}"
                for s in bound.get("subjects", ())
            ]
            if kind == "rolebindings" and where == namespace and user in subjects:
                rules += self._objects["roles", where, bound["roleRef"]["name"]]["rules"]
        return any(verb in rule["verbs"] and resource in rule["resources"] for rule in rules)

    def _namespace(self, verb: str, name: str) -> web.Response:
        if verb == "create":
            self.namespaces.add(name)
        if name not in self.namespaces:
            return refusal(404, "NotFound", f'namespaces "{name}" not found')
        if verb == "delete":
            self.namespaces.discard(name)
            for key in [key for key in self._objects if key[1] == name]:
                del self._objects[key]
        return web.json_response({"metadata": {"name": name}}, status=201)

    def _list(self, request: web.Request, namespace: str, kind: str) -> web.Response:
        query = request.query
        found = [o for (k, n, _), o in self._objects.items() if (k, n) == (kind, namespace)]
        found = [o for o in found if selected(o, query.get("labelSelector", ""))]
        start = int(query.get("continue", 0))
        stop = start + int(query.get("limit") or len(found))
        metadata = {"resourceVersion": str(self._version)}
        if stop < len(found):
            metadata["continue"] = str(stop)
        return web.json_response({"metadata": metadata, "items": found[start:stop]})

    @property
    def _version(self) -> int:
        return self._events[-1][0] if self._events else self._floor

    async def _watch(self, request: web.Request, namespace: str) -> web.StreamResponse:
        query = dict(request.query)
        self.watches.append(query)
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        after = int(query.get("resourceVersion") or 0)
        if self.gone or after < self._floor:
            self.gone = max(self.gone - 1, 0)
            said = f"too old resource version: {after} ({self._floor})"
            error = {"type": "ERROR", "object": status_of(410, "Expired", said)}
            await response.write(json.dumps(error).encode() + b"\n")
            return response
        if self.hung_up:
            self.hung_up -= 1
            await response.write(b'{"type": "MODIF')
            assert request.transport is not None
            request.transport.abort()
            return response
        end = asyncio.get_running_loop().time() + float(query.get("timeoutSeconds") or 300)
        while True:
            for version, kind, found in list(self._events):
                if version <= after:
                    continue
                after = version
                mine = found["metadata"].get("namespace", namespace) == namespace
                if mine and (kind == "BOOKMARK" or selected(found, query.get("labelSelector", ""))):
                    line = json.dumps({"type": kind, "object": found}).encode() + b"\n"
                    await response.write(line[:7])  # a network cuts where it likes
                    await response.write(line[7:])
            left = end - asyncio.get_running_loop().time()
            if left <= 0:
                return response
            async with self._news:
                try:
                    async with asyncio.timeout(left):
                        while self._version <= after:
                            await self._news.wait()
                except TimeoutError:
                    return response

    async def _create(self, namespace: str, kind: str, sent: Json) -> web.Response:
        if namespace not in self.namespaces:
            return refusal(404, "NotFound", f'namespaces "{namespace}" not found')
        metadata = sent["metadata"] | {"namespace": namespace, "uid": str(uuid.uuid4())}
        found = sent | {"metadata": metadata}
        if kind == "pods":
            found["status"] = {"phase": "Pending"}
        self._objects[kind, namespace, metadata["name"]] = found
        await self._changed("ADDED", found)
        return web.json_response(found, status=201)

    async def _patch(self, found: Json, patch: Json, subresource: str) -> web.Response:
        metadata = patch.get("metadata", {})
        if metadata.get("uid", found["metadata"]["uid"]) != found["metadata"]["uid"]:
            return refusal(422, "Invalid", "metadata.uid: Invalid value: field is immutable")
        if metadata.get("resourceVersion", "") not in ("", found["metadata"]["resourceVersion"]):
            return refusal(409, "Conflict", "the object has been modified")
        if "uid" in metadata and self.conflicts:
            self.conflicts -= 1
            return refusal(409, "Conflict", "Operation cannot be fulfilled on pods")
        if subresource == "status":
            self.patches.append(patch)
            patch = {key: patch[key] for key in ("metadata", "status") if key in patch}
        merge(found, patch)
        await self._changed("MODIFIED", found)
        return web.json_response(found)

    async def _changed(self, kind: str, found: Json) -> None:
        found["metadata"]["resourceVersion"] = str(next(self._versions))
        await self._record(kind, found)

    async def _record(self, kind: str, found: Json) -> None:
        version = int(found["metadata"].get("resourceVersion") or next(self._versions))
        found["metadata"]["resourceVersion"] = str(version)
        async with self._news:
            self._events.append((version, kind, copy.deepcopy(found)))
            del self._events[:-_KEPT]
            self._news.notify_all()


def split(path: str) -> tuple[str, str, str, str, str]:
    """Group, namespace, resource, name and subresource of a path; '' for what it lacks."""
    words = path.strip("/").split("/")
    group = words[1] if words[0] == "apis" else ""
    words = words[3 if group else 2 :]  # behind the version
    if words == ["namespaces"]:
        return group, "", "namespaces", "", ""
    words = [words[1], *(words[2:] or ("namespaces", words[1])), "", ""]
    return group, words[0], words[1], words[2], words[3]


def selected(found: Json, selector: str) -> bool:
    labels = found["metadata"].get("labels", {})
    pairs = [part.split("=") for part in selector.split(",") if part]
    return all(labels.get(name) == value for name, value in pairs)


def merge(into: Json, patch: Json) -> None:
    """A strategic merge: lists merge by the key that the API's types declare; null removes."""
    keys = {"conditions": "type", "containerStatuses": "name"}
    for name, value in patch.items():
        if value is None:
            into.pop(name, None)
        elif name == "annotations" and name not in into:  # as kube-apiserver 1.20 does
            into[name] = {key: text or "" for key, text in value.items()}
        elif isinstance(value, dict):
            merge(into.setdefault(name, {}), value)
        elif name in keys:
            there = into.setdefault(name, [])
            for entry in value:
                same = [old for old in there if old[keys[name]] == entry[keys[name]]]
                if same:
                    same[0].update(entry)
                else:
                    there.append(entry)
        else:
            into[name] = value


def status_of(code: int, reason: str, message: str) -> Json:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }


def refusal(code: int, reason: str, message: str) -> web.Response:
    return web.json_response(status_of(code, reason, message), status=code)
