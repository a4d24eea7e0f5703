"""The contract of a Kubernetes API server, checked on a fake one and on faults of its own."""

import pytest

from tests.fake_servers import running
from tests.fake_servers.kubernetes import ADMIN, FakeKubernetes
from tests.verify.kubernetes.contract import CHECKS, Check
from tests.verify.kubernetes.kubelet import Kubelet
from verify.kubernetes.cluster import Cluster


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_contract_on_the_fake_server(check: Check) -> None:
    async with running(FakeKubernetes()) as server:
        admin = Cluster(server.url, "default", None, lambda: ADMIN)
        async with Kubelet(admin, "test") as kubelet:
            await check(kubelet)
