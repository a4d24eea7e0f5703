"""Imitates how servers with OpenAI's API differ, in their streams and elsewhere."""

import json
from dataclasses import dataclass, field
from typing import Any

from serve.engine.engine import EngineStats

__all__ = ["FLAVOURS", "Flavour"]


@dataclass(frozen=True)
class Flavour:
    """One kind of server."""

    name: str
    chunk_extra: dict[str, Any] = field(default_factory=dict)  # of each chunk
    choice_extra: dict[str, Any] = field(default_factory=dict)  # of each choice
    stop_reason: str | None = None  # the choice's field with the stop string or token id
    token_ids: bool = False  # names tokens by id where asked to
    newline: str = "\n"
    before: str = ""  # what comes before each event's data: a comment, an id
    max_model_len: bool = False  # listed by /v1/models
    metrics_path: str = "/metrics"
    metrics: str = ""
    tokenize: bool = False
    named_events: bool = False  # has Responses and Messages
    default_limit: int = 512  # tokens of a completion without max_tokens, or with null

    def event(self, number: int, chunk: dict[str, Any] | str) -> bytes:
        """One server-sent event."""
        data = chunk if isinstance(chunk, str) else json.dumps(chunk, separators=(",", ":"))
        before = self.before.replace("{n}", str(number))
        return f"{before}data: {data}\n\n".replace("\n", self.newline).encode()

    def metrics_page(self, stats: EngineStats) -> str:
        """Its Prometheus page, among whose lines are some of no interest."""
        values = {
            "running": stats.running,
            "waiting": stats.waiting,
            "usage": stats.cached_tokens / (stats.slots * 512),
            "capacity": stats.slots * 512,
            "blocks": stats.slots * 32,
        }
        lines = [line.strip() for line in self.metrics.strip().splitlines()]
        return "\n".join(["# HELP of no interest", "# TYPE x gauge", *lines, ""]) % values


_VLLM_METRICS = """
vllm:num_requests_running{engine="0",model_name="fake"} %(running).1f
vllm:num_requests_waiting{engine="0",model_name="fake"} %(waiting).1f
vllm:num_requests_waiting_by_reason{engine="0",model_name="fake",reason="capacity"} 7.0
vllm:kv_cache_usage_perc{engine="0",model_name="fake"} %(usage)r
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="%(blocks)d"} 1.0
vllm:e2e_request_latency_seconds_bucket{engine="0",le="0.3",model_name="fake"} 4.0
process_open_fds 38.0
"""
_SGLANG_METRICS = """
sglang:num_running_reqs{model_name="fake",tp_rank="0"} %(running).1f
sglang:num_queue_reqs{model_name="fake",tp_rank="0"} %(waiting).1f
sglang:token_usage{model_name="fake",tp_rank="0"} %(usage)r
sglang:max_total_num_tokens{model_name="fake"} %(capacity)d
sglang:gen_throughput{model_name="fake"} 41.5
"""
_TRTLLM_METRICS = """
trtllm_num_requests_running{engine_type="trtllm",model_name="fake"} %(running).1f
trtllm_num_requests_waiting{engine_type="trtllm",model_name="fake"} %(waiting).1f
trtllm_kv_cache_utilization{engine_type="trtllm",model_name="fake"} %(usage)r
"""
_NULLS = {"usage": None}

FLAVOURS = {
    flavour.name: flavour
    for flavour in (
        Flavour(
            "vllm",
            stop_reason="stop_reason",
            token_ids=True,
            max_model_len=True,
            metrics=_VLLM_METRICS,
            tokenize=True,
            named_events=True,
            default_limit=16,
        ),
        Flavour(
            "sglang",
            chunk_extra=_NULLS,
            choice_extra={"matched_stop": None},
            stop_reason="matched_stop",
            max_model_len=True,
            metrics=_SGLANG_METRICS,
            default_limit=16,
        ),
        Flavour(
            "trtllm-serve",
            choice_extra={"stop_reason": None, "disaggregated_params": None},
            stop_reason="stop_reason",
            metrics_path="/prometheus/metrics",
            metrics=_TRTLLM_METRICS,
        ),
        # A Rust server: comments keep the connection alive.
        Flavour("dynamo", chunk_extra=_NULLS | {"service_tier": None}, before=":\n\n"),
        # Servers on sse-starlette: lines end in CRLF, events have ids.
        Flavour("sse-starlette", newline="\r\n", before=": ping\n\nid: {n}\nevent: message\n"),
    )
}
