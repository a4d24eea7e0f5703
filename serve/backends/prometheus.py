"""Reads a server's load from its Prometheus page: only the few lines needed, found by name.

A page of vLLM has some 500 lines, most of them histograms; parsing them all would cost more than
the request for the page. The names come from each server's source or documentation.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from serve.backends.base import LoadReport

__all__ = ["load_of", "samples"]

Sample = tuple[dict[str, str], float]  # labels and value
Samples = Mapping[str, list[Sample]]

_MOST = 1e15  # larger than any real value
_DIGITS = re.compile(r"[0-9]{1,15}")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def load_of(page: bytes) -> LoadReport | None:
    """Returns the load that `page` reports, of any known server; None if it has no known names.

    Adds up several engines (data parallel), and averages their KV usages.
    """
    for server in _SERVERS:
        found = samples(page, server.names)
        running, waiting = (_values(found, *which) for which in (server.running, server.waiting))
        if running or waiting:
            usage = _values(found, *server.kv_usage)
            return LoadReport(
                running=round(sum(running)),
                waiting=round(sum(waiting)),
                kv_usage=sum(usage) / len(usage) if usage else None,
                capacity_tokens=server.capacity(found) or None,
            )
    return None


def samples(page: bytes, names: Iterable[str]) -> Samples:
    """Maps each of `names` that occurs to its samples; skips lines that are not samples."""
    wanted = b"|".join(re.escape(name.encode()) for name in names)
    line = re.compile(rb"^(" + wanted + rb")(?:\{(.*)\})? ([^ \r\n]+)", re.MULTILINE)
    found: dict[str, list[Sample]] = {}
    for name, labels, value in line.findall(page):
        try:
            sample = (dict(_LABEL.findall(labels.decode(errors="replace"))), float(value))
        except ValueError:
            continue
        if 0 <= sample[1] <= _MOST:  # no NaN (an engine that has not measured yet) and no Inf
            found.setdefault(name.decode(), []).append(sample)
    return found


Which = tuple[str, Mapping[str, str]]  # a metric, and labels that its samples must have


@dataclass(frozen=True)
class _Server:
    """Names of the metrics of one kind of server."""

    running: Which
    waiting: Which
    kv_usage: Which  # 0 to 1
    capacity: Callable[[Samples], int] = lambda found: 0  # tokens; 0 if it is not reported
    capacity_name: str = ""

    @property
    def names(self) -> list[str]:
        names = {which[0] for which in (self.running, self.waiting, self.kv_usage)}
        return sorted(names | ({self.capacity_name} - {""}))


def _values(found: Samples, name: str, labels: Mapping[str, str]) -> list[float]:
    return [value for has, value in found.get(name, ()) if labels.items() <= has.items()]


def _vllm_capacity(found: Samples) -> int:
    """Multiplies blocks by tokens per block. Both are "None" until the engine has measured."""
    total = 0
    for labels, _ in found.get("vllm:cache_config_info", ()):
        blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
        if _DIGITS.fullmatch(blocks) and _DIGITS.fullmatch(size):
            total += int(blocks) * int(size)
    return total


def _sglang_capacity(found: Samples) -> int:
    return round(sum(_values(found, "sglang:max_total_num_tokens", {})))


def _triton_trtllm_capacity(found: Samples) -> int:
    name, kind = "nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type"
    blocks, size = (_values(found, name, {kind: which}) for which in ("max", "tokens_per"))
    return round(sum(b * s for b, s in zip(blocks, size, strict=False)))


_SERVERS = (
    _Server(
        running=("vllm:num_requests_running", {}),
        waiting=("vllm:num_requests_waiting", {}),
        kv_usage=("vllm:kv_cache_usage_perc", {}),
        capacity=_vllm_capacity,
        capacity_name="vllm:cache_config_info",
    ),
    _Server(  # with --enable-metrics
        running=("sglang:num_running_reqs", {}),
        waiting=("sglang:num_queue_reqs", {}),
        kv_usage=("sglang:token_usage", {}),
        capacity=_sglang_capacity,
        capacity_name="sglang:max_total_num_tokens",
    ),
    _Server(  # trtllm-serve, on /prometheus/metrics
        running=("trtllm_num_requests_running", {}),
        waiting=("trtllm_num_requests_waiting", {}),
        kv_usage=("trtllm_kv_cache_utilization", {}),
    ),
    _Server(  # Triton's TensorRT-LLM backend
        running=("nv_trt_llm_request_metrics", {"request_type": "scheduled"}),
        waiting=("nv_trt_llm_request_metrics", {"request_type": "waiting"}),
        kv_usage=("nv_trt_llm_kv_cache_block_metrics", {"kv_cache_block_type": "fraction"}),
        capacity=_triton_trtllm_capacity,
    ),
)
