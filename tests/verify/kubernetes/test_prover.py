"""Pods whose fake servers are proven through a fake API server."""

import asyncio
import json
import logging
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from octet.errors import ConfigError
from serve.backends.base import Incarnation
from serve.backends.openai_http import OpenAiHttpBackend
from serve.config import Health, PoolConfig
from serve.config.proof import Proof
from serve.proof.golden_exam import GoldenExam
from tests.fake_servers import FakeOpenAI, running
from tests.fake_servers.kubernetes import ADMIN, FakeKubernetes
from tests.fakes import FakeRunner, fake_backend
from tests.serve.proof.fake_proofs import WORSE, noisy, served
from tests.serve.waiting import until
from tests.verify.kubernetes.kubelet import LABELS, ROLE, Kubelet
from verify.kubernetes import prover as module
from verify.kubernetes.api import ApiError, Pods
from verify.kubernetes.cluster import Cluster
from verify.kubernetes.pod import Pod
from verify.kubernetes.prover import PodProver, Watched
from verify.kubernetes.run import Options, prove_pods
from verify.server.connect import Query


class Stage:
    """A fake API server, its kubelet, and provers of pods in the namespace `test`."""

    def __init__(self, kubernetes: FakeKubernetes, kubelet: Kubelet, proofs: Path) -> None:
        self.kubernetes = kubernetes
        self.kubelet = kubelet
        self.settings: dict[str, Any] = {}  # of the query
        self._proofs = proofs

    @asynccontextmanager
    async def prover(
        self, cluster: Cluster | None = None, **settings: Any
    ) -> AsyncIterator[PodProver]:
        proof = Proof(golden=self._proofs, **settings)
        config = PoolConfig(proof=proof, health=Health(probe_after_s=None, reconnect_s=0.1))
        exam = GoldenExam.load(self._proofs, proof)
        cluster = cluster or self.kubelet.admin
        async with Pods(cluster, self.kubelet.namespace, LABELS) as pods:
            query = Query(url="", golden=self._proofs, **self.settings)
            prover = PodProver(pods, query, config, exam, port="http", rng=random.Random(1))
            task = asyncio.create_task(prover.run())
            await until(lambda: task.done() or prover.listed.is_set())
            if task.done():
                task.result()
            try:
                yield prover
            finally:
                task.cancel()
                await asyncio.wait({task})

    async def pod(self, name: str, server: FakeOpenAI, container: str = "c1") -> None:
        await self.kubelet.create(name, port=int(server.url.rpartition(":")[2]))
        await self.kubelet.run(name, container)


@pytest.fixture
async def stage(proofs: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    monkeypatch.setattr(module, "_COMPARE_S", 0.02)
    monkeypatch.setattr(module, "_READ_S", 0.1)
    monkeypatch.setattr(module, "_SILENT_S", (0.05, 0.2))
    monkeypatch.setattr(module, "_API_S", (0.05, 0.2))
    async with AsyncExitStack() as stack:
        kubernetes = await stack.enter_async_context(running(FakeKubernetes()))
        admin = Cluster(kubernetes.url, "test", None, lambda: ADMIN)
        kubelet = await stack.enter_async_context(Kubelet(admin, "test"))
        yield Stage(kubernetes, kubelet, proofs)


async def test_a_pod_is_proven_and_annotated_with_the_role_of_the_chart(stage: Stage) -> None:
    role = await stage.kubelet.service_account("prover", [*ROLE])
    async with running(served()) as server, stage.prover(role) as prover:
        await stage.pod("a", server)
        pod = await stage.kubelet.until("a", "True", "Proven")
        said = pod["metadata"]["annotations"]
        exam = prover._exam
        assert said["octet.dev/artifact"] == exam.identity
        assert said["octet.dev/settings"] == "weights=quantized"
        mean, low, high, unit = (
            said["octet.dev/divergence"].translate({91: "", 44: "", 93: ""}).split()
        )
        assert 0 <= float(low) <= float(mean) <= float(high) < 0.1 and unit == "nats"
        assert said["octet.dev/proven-server"].startswith(f"containerd://c1 {server.url}")
        await stage.kubelet.delete("a")
        await until(lambda: not prover.watched and not prover.pool.members)


async def test_a_wrong_server_never_gets_the_condition(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(served(WORSE)) as server, stage.prover():
        await stage.pod("a", server)
        async with stage.kubelet.recorded("a") as seen:
            pod = await stage.kubelet.until("a", "False", "Refused")
    assert "True" not in seen
    assert "octet.dev/proven-server" not in pod["metadata"]["annotations"]
    assert "octet.dev/divergence" in pod["metadata"]["annotations"]
    assert "test/a is refused: " in caplog.text


async def test_the_key_is_sent_to_the_selected_pods_alone_and_written_nowhere(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SERVERS_KEY", "sk-of-the-servers")
    stage.settings = {"api_key_env": "SERVERS_KEY"}
    caplog.set_level(logging.DEBUG)
    async with running(served()) as server, running(served()) as other, stage.prover():
        port = int(other.url.rpartition(":")[2])
        await stage.kubelet.create("other", port=port, labels="app=other")
        await stage.kubelet.run("other")
        await stage.pod("a", server)
        pod = await stage.kubelet.until("a", "True")
    assert {x["authorization"] for x in server.headers} == {"Bearer sk-of-the-servers"}
    assert other.headers == []
    assert "sk-of-the-servers" not in json.dumps(pod) + caplog.text


def test_a_key_that_is_not_set_is_an_error_at_the_start(
    proofs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SERVERS_KEY", raising=False)
    query = Query(url="", golden=proofs, api_key_env="SERVERS_KEY")
    with pytest.raises(ConfigError, match="variable SERVERS_KEY with the API key is not set"):
        prove_pods(Options(query, LABELS))


async def test_a_restarted_container_loses_the_condition_until_it_is_proven(stage: Stage) -> None:
    async with running(served()) as server, stage.prover():
        await stage.pod("a", server)
        await stage.kubelet.until("a", "True")
        async with stage.kubelet.recorded("a") as seen:
            await stage.kubelet.run("a", "c2")
            await stage.kubelet.until("a", "False")
            pod = await stage.kubelet.until("a", "True")
    assert pod["metadata"]["annotations"]["octet.dev/proven-server"].startswith("containerd://c2")
    # The kubelet's own write still says True: nobody else could know.
    assert seen[0] == "True" and seen[1] == "False" and seen[-1] == "True"


async def test_a_restarted_prover_leaves_proven_pods_in(stage: Stage) -> None:
    async with running(served()) as server:
        async with stage.prover():
            await stage.pod("a", server)
            await stage.kubelet.until("a", "True")
        async with stage.kubelet.recorded("a") as seen, stage.prover() as prover:
            await until(lambda: any(m.proof and m.proof.admits for m in prover.pool.members))
            await asyncio.sleep(0.2)
    assert set(seen) <= {"True"}


async def test_a_prover_of_other_settings_proves_anew(stage: Stage) -> None:
    async with running(served()) as server:
        async with stage.prover():
            await stage.pod("a", server)
            await stage.kubelet.until("a", "True")
        stage.settings = {"weights": "original"}
        async with stage.prover(weights="original"):
            await stage.kubelet.until("a", "False", "Refused")


async def test_a_server_that_never_answers_is_reported_and_tried_again(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(served()) as server:
        port = int(server.url.rpartition(":")[2])
        await server.stop()
        async with stage.prover():
            await stage.pod("a", server)
            pod = await stage.kubelet.until("a", "False", "NotAnswering")
            assert f"127.0.0.1:{port}" in (await stage.kubelet.condition("a"))["message"]
            await asyncio.sleep(0.5)
            assert caplog.text.count("trying again") == 1  # not once for each attempt
            await server.start(port)
            await stage.kubelet.until("a", "True")
    assert pod["status"]["phase"] == "Running"


async def test_a_prover_that_loses_a_proven_server_leaves_it_to_the_readiness_probe(
    stage: Stage,
) -> None:
    async with running(served()) as server, stage.prover() as prover:
        port = int(server.url.rpartition(":")[2])
        await stage.pod("a", server)
        await stage.kubelet.until("a", "True")
        async with stage.kubelet.recorded("a") as seen:
            await server.stop()
            await until(lambda: not prover.pool.members[0].reachable)
            await asyncio.sleep(0.2)
            await server.start(port)
            await until(lambda: prover.pool.members[0].up)
    assert set(seen) <= {"True"}


async def test_a_server_that_turns_wrong_loses_the_condition(stage: Stage) -> None:
    async with running(served()) as server, stage.prover(every_s=0.1, share=1.0):
        await stage.pod("a", server)
        await stage.kubelet.until("a", "True")
        wrong = fake_backend(FakeRunner(model=noisy(WORSE, 2)))
        await wrong.start()
        before, server.engine = server.engine, wrong
        await stage.kubelet.until("a", "False", "Refused")
        await before.close()


async def test_pods_without_an_address_a_port_or_a_gate_are_named(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with stage.prover():
        await stage.kubelet.create("pending")
        await stage.kubelet.create("gateless", gate=False)
        await stage.kubelet.until("pending", "False", "NotRunning")
    assert (await stage.kubelet.condition("pending"))["message"] == "the pod has no IP address yet"
    assert "pod gateless has no readiness gate octet.dev/proven: it gets traffic" in caplog.text


async def test_a_pod_whose_port_has_another_name_is_named_once(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    async with stage.prover():
        await stage.kubelet.create("other", port_name="web")
        await stage.kubelet.run("other")
        await stage.kubelet.until("other", "False", "NotRunning")
        await stage.kubelet.run("other", ready=True)
        await asyncio.sleep(0.3)
    assert "port named 'http'" in (await stage.kubelet.condition("other"))["message"]
    assert "Traceback" not in caplog.text


async def test_the_prover_survives_what_an_api_server_does(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    kubernetes, kubelet = stage.kubernetes, stage.kubelet
    async with running(served()) as server, stage.prover() as prover:
        kubernetes.conflicts = 2
        await stage.pod("a", server)
        await kubelet.until("a", "True")
        kubernetes.gone = kubernetes.hung_up = 1
        watches = len(kubernetes.watches)
        await kubernetes.bookmark()
        version = str(kubernetes._version)
        await kubernetes.stop()
        await until(lambda: "the conditions stay as they are" in caplog.text and prover.problem)
        await kubernetes.start(int(kubernetes.url.rpartition(":")[2]))
        await until(lambda: len(kubernetes.watches) >= watches + 3)
        assert kubernetes.watches[watches]["resourceVersion"] == version  # the bookmark's
        await stage.pod("b", server)
        await kubelet.until("b", "True")
        assert not prover.problem


async def test_what_cannot_work_ends_it_at_the_start(stage: Stage) -> None:
    nobody = await stage.kubelet.service_account("nobody")
    with pytest.raises(ApiError, match=r'cannot list resource "pods" .* \(403\); a Role needs'):
        async with stage.prover(nobody):
            pass
    stage.kubelet.namespace = "absent"
    with pytest.raises(ApiError, match="there is no namespace 'absent'; name one with --namespace"):
        async with stage.prover():
            pass
    stage.kubelet.namespace = "test"


async def test_a_restart_that_the_pool_has_not_noticed_keeps_the_server_that_was_proven(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the condition would be "True" for the new server without a proof."""
    now: list[Incarnation] = [Incarnation(("m",), 1000.0)]

    async def incarnation(_: object) -> Incarnation:
        return now[0]

    monkeypatch.setattr(OpenAiHttpBackend, "incarnation", incarnation)
    async with running(served()) as server, stage.prover() as prover:
        await stage.pod("a", server)
        await stage.kubelet.until("a", "True")
        (watched,) = prover.watched.values()
        (member,) = prover.pool.members
        await until(lambda: str(watched.server).endswith(" 1000.00"))
        now[0] = Incarnation(("m",), 2000.0)
        await prover._read(watched, member)
        assert str(watched.server).endswith(" 1000.00")
        member.forget("it was restarted")
        await until(lambda: str(watched.server).endswith(" 2000.00"))


async def test_a_server_whose_counts_do_not_come_is_one_member(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def incarnation(_: object) -> Incarnation:
        raise TimeoutError

    monkeypatch.setattr(OpenAiHttpBackend, "incarnation", incarnation)
    async with running(served()) as server, stage.prover() as prover:
        await stage.pod("a", server)
        await stage.kubelet.until("a", "True")
        assert len(prover.pool.members) == 1 and not prover.pool._prepared


async def test_what_the_api_server_does_not_keep_is_not_written_without_end(
    stage: Stage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch = stage.kubernetes._patch

    async def forgetful(found: Any, sent: Any, subresource: str) -> Any:
        if sent.get("metadata"):
            sent["metadata"].pop("annotations")
        return await patch(found, sent, subresource)

    monkeypatch.setattr(stage.kubernetes, "_patch", forgetful)
    async with stage.prover():
        await stage.kubelet.create("a")
        await until(lambda: "did not keep all that was written" in caplog.text)
        await asyncio.sleep(0.2)  # ten comparisons
    assert len([sent for sent in stage.kubernetes.patches if "metadata" in sent]) == 1
    assert caplog.text.count("did not keep") == 1


async def test_a_token_that_cannot_be_read_for_a_moment_does_not_end_the_prover(
    stage: Stage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "token"
    file.write_text(ADMIN)

    def token() -> str:
        try:
            return file.read_text()
        except OSError:
            raise ConfigError(f"{file}: No such file or directory") from None

    cluster = Cluster(stage.kubernetes.url, "test", None, token)
    async with running(served()) as server, stage.prover(cluster) as prover:
        file.unlink()
        await stage.pod("a", server)
        await until(lambda: "No such file" in caplog.text)
        assert ADMIN not in caplog.text
        file.write_text(ADMIN)
        await stage.kubelet.until("a", "True")
        assert not prover.problem


async def test_a_report_is_text_that_the_api_server_keeps(stage: Stage) -> None:
    """A verdict names what the engine reports; a condition that differs is written again."""
    async with stage.prover() as prover:
        pod = Pod.read(await stage.kubelet.create("a"), "http")
        report = prover._with_annotations(
            Watched(pod), "False", "Refused", "of type \ud800\n", None
        )
    assert report.message == r"of type \ud800\n"
