"""`octet prove --kubernetes`: sets a condition on pods whose servers match an artifact."""

import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from octet.artifacts.manifest import Manifest
from octet.errors import ConfigError
from octet.hardware.devices import find_device

__all__ = ["prove"]

_NAME = re.compile(r"[a-z]([a-z0-9-]{0,13}[a-z0-9])?")  # of a port
_CONDITION = re.compile(r"[a-z0-9]([a-z0-9.-]{0,250}[a-z0-9])?/[A-Za-z0-9]([\w.-]{0,61}\w)?")


def prove(
    kubernetes: Annotated[
        bool, typer.Option("--kubernetes", help="Prove the pods of a Kubernetes namespace.")
    ] = False,
    selector: Annotated[
        str | None,
        typer.Option("--selector", "-l", metavar="LABELS", help="Labels of the pods, as app=vllm."),
    ] = None,
    golden: Annotated[
        Path | None,
        typer.Option("--golden", help="The export, calibration or proof pack they must match."),
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option("--namespace", "-n", help="Namespace (default: the pod's, or the context's)."),
    ] = None,
    port: Annotated[str, typer.Option(help="Port of the servers: a number, or its name.")] = "8000",
    condition: Annotated[
        str, typer.Option(help="Condition type, which the pods' readinessGates name.")
    ] = "octet.dev/proven",
    key: Annotated[
        Path | None,
        typer.Option("--key", help="Public Ed25519 key that must have signed --golden."),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="The model's name, if a server has several.")
    ] = None,
    weights: Annotated[
        Literal["quantized", "original"],
        typer.Option("--weights", help="Weights that they should serve."),
    ] = "quantized",
    kv_cache: Annotated[
        Literal["e5m2", "e4m3", "float16"] | None,
        typer.Option("--kv-cache", help="Cache that they should use (default: --golden's)."),
    ] = None,
    engine: Annotated[
        Literal["vllm-gpu", "vllm-cpu", "tensorrt", "onnxruntime"] | None,
        typer.Option("--engine", help="Engine. Restricts which numerics count as correct."),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="Their GPU, such as h100. Restricts further.")
    ] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(
            "--api-key-env",
            help="Environment variable with their key. All selected pods get it, over HTTP.",
        ),
    ] = None,
    every: Annotated[
        float, typer.Option("--every", min=1.0, help="Least seconds between probes of a pod.")
    ] = 300.0,
    share: Annotated[
        float,
        typer.Option("--share", min=0.0, max=1.0, help="Largest share of tokens for probes."),
    ] = 0.01,
    metrics: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="HOST:PORT to serve /metrics, /health and /ready."),
    ] = None,
    logs: Annotated[
        Literal["text", "json"], typer.Option("--logs", help="Format of the log.")
    ] = "text",
    kubeconfig: Annotated[
        Path | None,
        typer.Option(help="Default: the pod's service account, $KUBECONFIG, ~/.kube/config."),
    ] = None,
    context: Annotated[
        str | None, typer.Option("--context", help="Context of the kubeconfig.")
    ] = None,
) -> None:
    """Prove the servers of pods, again and again, and let only proven pods become ready.

    Sets a condition on each pod, which the pod's readinessGates wait for, so that whatever routes
    to ready pods routes to proven ones. Runs until it is stopped, in the cluster or outside of it.
    One server is proven once by `octet verify URL --golden DIR`.
    """
    if not kubernetes:
        raise ConfigError(
            "prove is for pods: give --kubernetes; for one server: octet verify URL --golden DIR"
        )
    if selector is None or not selector.strip():
        raise ConfigError("which pods? give --selector, such as app=vllm")
    if golden is None:
        raise ConfigError("give --golden, the directory of the export that the pods serve")
    if not (port.isdigit() and 0 < int(port) < 65536) and not _NAME.fullmatch(port):
        raise ConfigError(f"--port {port}: neither a port number nor the name of a port")
    if not _CONDITION.fullmatch(condition):
        raise ConfigError(f"--condition {condition}: write DOMAIN/NAME, such as octet.dev/proven")
    host, _, number = (metrics or "127.0.0.1:0").rpartition(":")
    if not host or not number.isdigit() or int(number) > 65535:
        raise ConfigError(f"--metrics {metrics}: write HOST:PORT, such as 0.0.0.0:9090")
    Manifest.load(golden, verify=False)
    if device is not None:
        find_device(device)
    from serve.config import Logs
    from verify.kubernetes.run import Options, prove_pods
    from verify.server.connect import Query

    query = Query(
        url="",
        golden=golden,
        key=key,
        model=model,
        api_key_env=api_key_env,
        weights=weights,
        kv_cache=kv_cache,
        engine=engine,
        device=device,
    )
    options = Options(
        query,
        selector,
        port=port,
        namespace=namespace,
        condition=condition,
        kubeconfig=kubeconfig,
        context=context,
        every_s=every,
        share=share,
        metrics=None if metrics is None else (host.strip("[]"), int(number)),
        logs=Logs(format=logs),
    )
    prove_pods(options)
