"""What Triton says of itself: how busy it is, and which life of a model answers."""

import hashlib
from typing import Any

import aiohttp
import grpc.aio
from tritonclient.grpc import model_config_pb2
from tritonclient.grpc import service_pb2 as pb

from serve.backends.base import Incarnation, LoadReport
from serve.backends.prometheus import load_of, samples

__all__ = ["described", "incarnation", "load_report"]

_kind = model_config_pb2.ModelInstanceGroup.Kind.Name
_PENDING = "nv_inference_pending_request_count"


async def load_report(metrics_url: str, model: str, timeout_s: float) -> LoadReport | None:
    """From Triton's metrics page, which is on HTTP."""
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(metrics_url, allow_redirects=False) as response,
        ):
            page = await response.read() if response.status == 200 else b""
    except (aiohttp.ClientError, OSError):
        return None
    pending = samples(page, (_PENDING,)).get(_PENDING, ())
    mine = [value for labels, value in pending if labels.get("model") == model]
    return load_of(page) or (LoadReport(0, round(sum(mine)), None, None) if mine else None)


async def described(stub: Any, model: str, timeout_s: float) -> dict[str, Any] | None:
    """What it tells about itself and the model: None if it does not answer."""
    try:
        server = await stub.ServerMetadata(pb.ServerMetadataRequest(), timeout=timeout_s)
        answer = await stub.ModelConfig(pb.ModelConfigRequest(name=model), timeout=timeout_s)
    except grpc.aio.AioRpcError:
        return None
    config = answer.config
    return {
        "version": server.version,
        "backend": config.backend or config.platform,
        "kinds": [_kind(group.kind) for group in config.instance_group],
        "parameters": {name: value.string_value for name, value in config.parameters.items()},
    }


async def incarnation(stub: Any, model: str, timeout_s: float) -> Incarnation | None:
    """By the model's configuration, versions and statistics.

    Loading a model again sets its statistics to zero (2.51: those of ModelStatistics;
    `nv_inference_count` goes on), and nothing else shows it: the connections stay, and the model is
    READY before and after. Triton loads again only if a file of the model has changed.
    """
    try:
        config = await stub.ModelConfig(pb.ModelConfigRequest(name=model), timeout=timeout_s)
        answer = await stub.ModelStatistics(
            pb.ModelStatisticsRequest(name=model), timeout=timeout_s
        )
    except grpc.aio.AioRpcError:
        return None
    digest = hashlib.sha256(config.config.SerializeToString(deterministic=True)).hexdigest()
    versions = sorted(answer.model_stats, key=lambda one: str(one.version))
    counts = [
        count
        for one in versions
        for count in (one.last_inference, one.execution_count, one.inference_stats.success.count)
    ]
    settings = (digest, *(str(one.version) for one in versions))
    return Incarnation(settings, counts=tuple(counts))
