"""The contract of a Kubernetes API server, checked on a fake one and on faults of its own."""

import asyncio

import pytest

from tests.fake_servers import running
from tests.fake_servers.kubernetes import ADMIN, FakeKubernetes
from tests.verify.kubernetes.contract import CHECKS, Check, pods
from tests.verify.kubernetes.kubelet import Kubelet
from verify.kubernetes import api
from verify.kubernetes.api import ApiError
from verify.kubernetes.cluster import Cluster


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_contract_on_the_fake_server(check: Check) -> None:
    async with running(FakeKubernetes()) as server:
        admin = Cluster(server.url, "default", None, lambda: ADMIN)
        async with Kubelet(admin, "test") as kubelet:
            await check(kubelet)


async def test_a_watch_that_does_not_end_fails_only_where_it_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not while an event is handled: that would end the prover's watch without an error."""
    async with running(FakeKubernetes()) as server:
        admin = Cluster(server.url, "default", None, lambda: ADMIN)
        async with Kubelet(admin, "test") as kubelet, pods(kubelet) as client:
            _, version = await client.list()
            await kubelet.create("a")
            monkeypatch.setattr(api, "_TIMEOUT_S", 0.3 - api.WATCH_S)
            with pytest.raises(ApiError, match="cannot watch pods: no answer in time"):
                async for _ in client.watch(version):
                    await asyncio.sleep(0.5)
