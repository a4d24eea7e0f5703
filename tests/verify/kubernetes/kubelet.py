"""Plays the kubelet and an administrator: makes pods, and says where their servers run.

Pods are bound to a node that does not exist, so no other kubelet touches them, and the tests' own
servers are their servers. It speaks the API's protocol, to a fake or to a real API server.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Self

import aiohttp

from verify.kubernetes.api import Pods
from verify.kubernetes.cluster import Cluster
from verify.kubernetes.pod import CONDITION

__all__ = ["LABELS", "ROLE", "Kubelet"]

Json = dict[str, Any]
LABELS = "app=vllm"
ROLE = [
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]},
    {"apiGroups": [""], "resources": ["pods/status"], "verbs": ["patch"]},
]


class Kubelet:
    """`async with` makes the namespace, and deletes it at the end."""

    def __init__(self, admin: Cluster, namespace: str) -> None:
        self.admin = admin
        self.namespace = namespace
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(ssl=self.admin.tls or True)
        self._session = aiohttp.ClientSession(connector=connector)
        await self.send("POST", "/api/v1/namespaces", {"metadata": {"name": self.namespace}})
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.send("DELETE", f"/api/v1/namespaces/{self.namespace}")
        assert self._session is not None
        await self._session.close()

    async def send(
        self, method: str, path: str, data: Json | None = None, kind: str = "application/json"
    ) -> Json:
        assert self._session is not None
        headers = {"content-type": kind}
        if token := self.admin.token():
            headers["authorization"] = f"Bearer {token}"
        for _ in range(50):  # a real cluster makes a namespace's service account in a moment
            async with self._session.request(
                *(method, self.admin.url + path), json=data, headers=headers
            ) as response:
                found: Json = json.loads(await response.read())
            if response.status != 403 or "serviceaccount" not in found["message"]:
                break
            await asyncio.sleep(0.2)
        assert response.status < 300, found
        return found

    @property
    def base(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}"

    async def create(
        self,
        name: str,
        *,
        port: int = 8000,
        port_name: str = "http",
        gate: bool = True,
        labels: str = LABELS,
    ) -> Json:
        """A pod that is bound to a node, and does not run yet."""
        container = {
            "name": "server",
            "image": "server",
            "ports": [{"name": port_name, "containerPort": port}],
        }
        spec: Json = {
            "nodeName": "no-such-node",
            "containers": [{"name": "proxy", "image": "proxy"}, container],
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 0,
        }
        if gate:
            spec["readinessGates"] = [{"conditionType": CONDITION}]
        metadata = {"name": name, "labels": dict([labels.split("=")])}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        return await self.send("POST", f"{self.base}/pods", pod)

    async def set_status(self, name: str, status: Json) -> Json:
        return await self.send(
            *("PATCH", f"{self.base}/pods/{name}/status", {"status": status}),
            "application/strategic-merge-patch+json",
        )

    async def run(
        self, name: str, container: str = "c1", *, ip: str = "127.0.0.1", ready: bool = False
    ) -> Json:
        """Says that the pod's containers run: the one that serves with this ID."""

        def status(name: str, container: str) -> Json:
            return {
                "name": name,
                "containerID": f"containerd://{container}",
                "image": name,
                "imageID": name,
                "ready": ready,
                "restartCount": 0,
                "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
            }

        running = [status("proxy", "always-the-same"), status("server", container)]
        return await self.set_status(
            name,
            {
                "phase": "Running",
                "podIP": ip,
                "podIPs": [{"ip": ip}],
                "containerStatuses": running,
            },
        )

    async def get(self, name: str) -> Json:
        return await self.send("GET", f"{self.base}/pods/{name}")

    async def delete(self, name: str) -> None:
        await self.send("DELETE", f"{self.base}/pods/{name}?gracePeriodSeconds=0")

    async def service_account(
        self, name: str, rules: list[Mapping[str, Any]] | None = None
    ) -> Cluster:
        """The cluster as a service account sees it, that may do what `rules` allow."""
        await self.send("POST", f"{self.base}/serviceaccounts", {"metadata": {"name": name}})
        group = "rbac.authorization.k8s.io"
        if rules:
            path = f"/apis/{group}/v1/namespaces/{self.namespace}"
            role = {"metadata": {"name": name}, "rules": rules}
            await self.send("POST", f"{path}/roles", role)
            bound = {
                "metadata": {"name": name},
                "roleRef": {"apiGroup": group, "kind": "Role", "name": name},
                "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": self.namespace}],
            }
            await self.send("POST", f"{path}/rolebindings", bound)
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        answer = await self.send("POST", f"{self.base}/serviceaccounts/{name}/token", request)
        token = answer["status"]["token"]
        return Cluster(self.admin.url, self.namespace, self.admin.tls, lambda: token)

    async def condition(self, name: str) -> Json:
        conditions = (await self.get(name))["status"].get("conditions", ())
        return next((c for c in conditions if c["type"] == CONDITION), {})

    async def until(self, name: str, status: str, reason: str = "", limit_s: float = 60) -> Json:
        """The pod, once its condition says so."""
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    found = await self.condition(name)
                    if found.get("status") == status and reason in ("", found["reason"]):
                        return await self.get(name)
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"{name}: still {found}") from None

    @asynccontextmanager
    async def recorded(self, name: str) -> AsyncIterator[list[str]]:
        """The condition's status at every event of the pod in the block."""
        seen: list[str] = []
        version = (await self.get(name))["metadata"]["resourceVersion"]

        async def follow() -> None:
            nonlocal version
            async with Pods(self.admin, self.namespace, LABELS) as pods:
                async for _, item in pods.watch(version):
                    if item["metadata"].get("name") == name:
                        version = item["metadata"]["resourceVersion"]
                        conditions = item["status"].get("conditions", ())
                        seen.extend(c["status"] for c in conditions if c["type"] == CONDITION)

        task = asyncio.create_task(follow())
        try:
            yield seen
            async with asyncio.timeout(60):
                while (await self.get(name))["metadata"]["resourceVersion"] != version:
                    assert not task.done(), "the watch has ended"
                    await asyncio.sleep(0.05)
        finally:
            task.cancel()
            await asyncio.wait({task})
