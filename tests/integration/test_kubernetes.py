"""`octet prove --kubernetes` on a real API server, for pods whose servers are real.

The API server is a kube-apiserver and an etcd of this machine (`make kubernetes-test` builds the
first from Debian's sources), or that of the cluster which OCTET_KUBECONFIG names. There is no
kubelet: the tests play it. On a cluster they make a namespace of their own, with pods that are
bound to a node that does not exist. Run:

    python -m pytest -n 0 tests/integration/test_kubernetes.py -rP
"""

import asyncio
import os
import re
import secrets
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import yaml

from tests.integration.servers import layout
from tests.integration.servers.launch import GatewayServer, KubernetesServer, VllmServer
from tests.integration.servers.process import free_port, signal_group
from tests.proof_servers import halve_weight_scales
from tests.verify.kubernetes.contract import CHECKS, Check
from tests.verify.kubernetes.kubelet import LABELS, ROLE, Kubelet
from verify.kubernetes.cluster import Cluster, find_cluster

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def admin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The API server, as somebody who may do everything."""
    if named := os.environ.get("OCTET_KUBECONFIG"):
        yield find_cluster(Path(named))
        return
    if not layout.is_ready(layout.KUBE_APISERVER):
        pytest.skip("no kube-apiserver: run `make kubernetes-test`, or set OCTET_KUBECONFIG")
    directory = tmp_path_factory.mktemp("kubernetes")
    server = KubernetesServer(log=directory / "log", directory=directory)
    with server:
        pass  # only one that has been restarted has forgotten events
    with server:
        yield find_cluster(server.kubeconfig)


@pytest.fixture
async def kubelet(admin: Cluster) -> AsyncIterator[Kubelet]:
    async with Kubelet(admin, f"octet-test-{secrets.token_hex(4)}") as kubelet:
        yield kubelet


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_contract_on_a_real_api_server(check: Check, kubelet: Kubelet) -> None:
    await check(kubelet)


def kubeconfig_of(cluster: Cluster, directory: Path) -> Path:
    """A file with the service account's token in a file of its own, as in a pod."""
    (directory / "token").write_text(cluster.token() or "")
    written = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [
            {"name": "c", "cluster": {"server": cluster.url, "insecure-skip-tls-verify": True}}
        ],
        "users": [{"name": "u", "user": {"tokenFile": "token"}}],
    }
    path = directory / "kubeconfig"
    path.write_text(yaml.safe_dump(written))
    return path


class Prover:
    """`octet prove --kubernetes` as a process, with the rights that the chart gives it."""

    def __init__(self, process: subprocess.Popen[str], log: Path, metrics: int) -> None:
        self.process = process
        self._log = log
        self._metrics = metrics

    @property
    def log(self) -> str:
        return self._log.read_text()

    def metric(self, name: str) -> dict[str, float]:
        """The samples of a metric by their labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics}/metrics") as answer:
            page = answer.read().decode()
        found = re.findall(rf"^{name}(\{{.*\}})? (\S+)$", page, re.M)
        return {labels: float(value) for labels, value in found}


@contextmanager
def proving(config: Path, kubelet: Kubelet, golden: Path, *options: str) -> Iterator[Prover]:
    log, port = config.with_name(f"prover-{secrets.token_hex(4)}.log"), free_port()
    command = [sys.executable, "-m", "octet", "prove", "--kubernetes", "--selector", LABELS]
    command += ["--namespace", kubelet.namespace, "--port", "http", "--golden", str(golden)]
    command += ["--kubeconfig", str(config), "--metrics", f"127.0.0.1:{port}", *options]
    with log.open("a") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, text=True, cwd=ROOT, start_new_session=True
        )
    try:
        yield Prover(process, log, port)
        assert process.poll() in (None, -signal.SIGKILL), log.read_text()
    finally:
        signal_group(process.pid, signal.SIGTERM)
        assert process.wait(30) in (0, -signal.SIGKILL), log.read_text()


@asynccontextmanager
async def rights(kubelet: Kubelet, directory: Path) -> AsyncIterator[Path]:
    yield kubeconfig_of(await kubelet.service_account("prover", [*ROLE]), directory)


@contextmanager
def embedded(artifact: Path, directory: Path) -> Iterator[GatewayServer]:
    """The embedded engine behind Octet's own API, which serves it proven or not."""
    directory.mkdir(exist_ok=True)
    config = directory / "gateway.yaml"
    port = free_port()
    backend = {"type": "embedded", "path": str(artifact), "threads": 1}
    pool = {"backends": [backend], "proof": {"enabled": False}}
    models = {"python-lm": {"pool": pool}}
    config.write_text(yaml.safe_dump({"listen": {"port": port}, "models": models}))
    with GatewayServer(config=config, port=port, log=directory / "log") as server:
        yield server


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


async def test_embedded_engines_in_pods(kubelet: Kubelet, exports: Path, tmp_path: Path) -> None:
    """Proven; restarted; the prover killed and started again; the server never answers."""
    golden = exports / "onnx"
    async with rights(kubelet, tmp_path) as config:
        with embedded(golden, tmp_path / "a") as server:
            await kubelet.create("a", port=port_of(server.url))
            await kubelet.create("silent", port=free_port())
            await kubelet.create("gateless", port=port_of(server.url), gate=False)
            with proving(config, kubelet, golden) as prover:
                await kubelet.until("a", "False", "NotRunning", 120)
                for name in ("a", "silent", "gateless"):
                    await kubelet.run(name, f"{name}-1")
                pod = await kubelet.until("a", "True", "Proven", 120)
                annotations = pod["metadata"]["annotations"]
                print("\n" + "\n".join(f"{k}: {v}" for k, v in sorted(annotations.items())))
                print(next(c for c in pod["status"]["conditions"] if "octet" in c["type"]))
                await kubelet.until("silent", "False", "NotAnswering")
                await kubelet.until("gateless", "True")
                assert "gateless has no readiness gate" in prover.log
                proven = prover.metric("octet_prover_pod_proven")
                assert proven['{gate="gated",pod="a"}'] == 1
                assert proven['{gate="gated",pod="silent"}'] == 0
                assert (
                    prover.metric("octet_backend_proof_state")[
                        f'{{backend="a",pool="{kubelet.namespace}"}}'
                    ]
                    == 3
                )
                async with kubelet.recorded("a") as seen:
                    await kubelet.run("a", "a-2")
                    await kubelet.until("a", "False")
                    await kubelet.until("a", "True")
                print("container restarted:", seen)
                assert seen.index("False") < len(seen) - 1 and seen[-1] == "True"
                async with kubelet.recorded("a") as seen:
                    signal_group(prover.process.pid, signal.SIGKILL)
                    prover.process.wait()
                    with proving(config, kubelet, golden) as again:
                        while f"{kubelet.namespace}/a is proven" not in again.log:
                            await asyncio.sleep(0.2)
                        await asyncio.sleep(1.0)
                print("prover killed and started:", seen)
                assert "False" not in seen


async def test_vllm_in_pods_right_and_with_halved_weight_scales(
    kubelet: Kubelet,
    exports: Path,
    tmp_path: Path,
    start_vllm_for_test: Callable[..., VllmServer],
) -> None:
    wrong = halve_weight_scales(exports / "checkpoint", tmp_path / "halved", 1)
    golden = exports / "checkpoint"
    async with rights(kubelet, tmp_path) as config:
        with proving(config, kubelet, golden, "--engine", "vllm-cpu") as prover:
            for name, checkpoint in (("right", golden), ("wrong", wrong)):
                server = await asyncio.to_thread(
                    start_vllm_for_test, checkpoint, served_name="python-lm-fp8"
                )
                await kubelet.create(name, port=port_of(server.url))
                await kubelet.run(name)
            await kubelet.until("right", "True", "Proven", 180)
            async with kubelet.recorded("wrong") as seen:
                pod = await kubelet.until("wrong", "False", "Refused", 180)
            assert "True" not in seen
            for name in ("right", "wrong"):
                print(f"\n{name}:", (await kubelet.condition(name))["message"])
            print(pod["metadata"]["annotations"])
            state = prover.metric("octet_backend_proof_state")
            assert sorted(state.values()) == [-1, 3]


async def test_what_cannot_work_is_one_line(
    kubelet: Kubelet, exports: Path, tmp_path: Path
) -> None:
    def refused(cluster: Cluster, *options: str) -> str:
        config = kubeconfig_of(cluster, tmp_path)
        command = [sys.executable, "-m", "octet", "prove", "--kubernetes", "-l", LABELS]
        command += ["--golden", str(exports / "onnx"), "--kubeconfig", str(config), *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
        assert done.returncode == 2, done.stderr
        line = done.stderr.splitlines()[-1]
        print(line)
        return line

    namespace = ("--namespace", kubelet.namespace)
    nobody = await kubelet.service_account("nobody")
    assert 'cannot list resource "pods"' in refused(nobody, *namespace)
    expired = Cluster(kubelet.admin.url, "", kubelet.admin.tls, lambda: "expired")
    assert "(401); the token or certificate has expired" in refused(expired, *namespace)
    assert "there is no namespace 'absent'" in refused(kubelet.admin, "--namespace", "absent")
    away = Cluster("https://127.0.0.1:9", "", None, lambda: "x")
    assert "cannot list pods: " in refused(away, *namespace)
