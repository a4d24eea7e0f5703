"""`octet prove --kubernetes`: proves the selected pods until a signal."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from serve.config import Health, Logs, PoolConfig
from serve.config.backends import key_in
from serve.gateway.collector import backend_metrics
from serve.proof.golden_exam import GoldenExam
from serve.run import bind
from serve.telemetry.logs import logging_to, say
from verify.kubernetes.api import Pods
from verify.kubernetes.cluster import find_cluster
from verify.kubernetes.pod import CONDITION
from verify.kubernetes.prover import PodProver
from verify.server.connect import Query

__all__ = ["Options", "prove_pods"]


@dataclass(frozen=True)
class Options:
    """The command line of `octet prove --kubernetes`."""

    query: Query  # its URL is each pod's own
    selector: str
    port: str = "8000"  # a number, or a port's name
    namespace: str | None = None
    condition: str = CONDITION
    kubeconfig: Path | None = None
    context: str | None = None
    every_s: float = 300.0
    share: float = 0.01
    metrics: tuple[str, int] | None = None  # host and port
    logs: Logs = field(default_factory=Logs)


def prove_pods(options: Options) -> None:
    """Runs until SIGINT or SIGTERM.

    Raises OctetError if the artifact, the cluster or the credentials cannot be used at the start.
    """
    query = options.query
    key_in(query.api_key_env)  # an unset variable is an error now, and not of each pod
    proof = query.proof(every_s=options.every_s, share=options.share)
    exam = GoldenExam.load(query.golden, proof)
    cluster = find_cluster(options.kubeconfig, options.context)
    namespace = options.namespace or cluster.namespace
    # No health check generates a token: it would cost a server more than its readiness probe does.
    config = PoolConfig(proof=proof, health=Health(probe_after_s=None))

    async def main() -> None:
        async with Pods(cluster, namespace, options.selector) as pods:
            prover = PodProver(
                *(pods, query, config, exam), port=options.port, condition=options.condition
            )
            async with _served(prover, options.metrics):
                line = f"proving pods {options.selector} in namespace {namespace} of {cluster.url}"
                say(f"{line} against {exam.label} (artifact {exam.identity[:12]})", options.logs)
                await _until_signal(prover)

    with logging_to(options.logs):
        asyncio.run(main())


async def _until_signal(prover: PodProver) -> None:
    task = asyncio.create_task(prover.run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


@contextlib.asynccontextmanager
async def _served(prover: PodProver, address: tuple[str, int] | None) -> AsyncIterator[None]:
    """Serves /metrics; /health; and /ready, once the pods have been listed."""
    if address is None:
        yield
        return
    registry = CollectorRegistry()
    registry.register(_PodCollector(prover))
    ProcessCollector(registry=registry)

    async def metrics(_: web.Request) -> web.Response:
        page = generate_latest(registry)
        return web.Response(body=page, headers={"content-type": CONTENT_TYPE_LATEST})

    async def health(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def ready(_: web.Request) -> web.Response:
        listed = prover.listed.is_set()
        state = {"ready": listed, "pods": len(prover.watched), "problem": prover.problem}
        return web.json_response(state, status=200 if listed else 503)

    app = web.Application()
    app.add_routes(
        [web.get("/metrics", metrics), web.get("/health", health), web.get("/ready", ready)]
    )
    runner = web.AppRunner(app, access_log=None)
    with contextlib.closing(bind(*address)) as listener:
        await runner.setup()
        try:
            await web.SockSite(runner, listener).start()
            yield
        finally:
            await runner.cleanup()


class _PodCollector(Collector):
    """The gateway's metrics of backends, whose alerts and dashboard apply, and those of pods."""

    def __init__(self, prover: PodProver) -> None:
        self._prover = prover

    def collect(self) -> Iterator[Metric]:
        prover = self._prover
        yield GaugeMetricFamily(
            "octet_prover_api_up",
            "1 if the Kubernetes API server answered the last request.",
            not prover.problem,
        )
        proven = GaugeMetricFamily(
            "octet_prover_pod_proven",
            "1 if the pod's condition is True; ungated: its readiness does not wait for it.",
            labels=("pod", "gate"),
        )
        for watched in list(prover.watched.values()):
            pod = watched.pod
            gate = "gated" if pod.gated else "ungated"
            proven.add_metric((pod.name, gate), pod.condition.get("status") == "True")
        yield proven
        yield from backend_metrics([prover.pool])
