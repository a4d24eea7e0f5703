"""How busy a server is, from its Prometheus page: the few lines needed, found by their names.

A page of vLLM has some 500 lines, most of them of histograms; a parser of them all would cost more
than the request that asked.
"""

import re
from collections.abc import Mapping, Sequence

from serve.backends.base import LoadReport

__all__ = ["samples", "sglang_load", "vllm_load"]

Samples = Mapping[str, Sequence[tuple[dict[str, str], float]]]

_VLLM = (
    *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:cache_config_info"),
    *("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),  # the latter until vLLM 0.10
)
_SGLANG = (
    *("sglang:num_running_reqs", "sglang:num_queue_reqs"),
    *("sglang:token_usage", "sglang:max_total_num_tokens"),
)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def samples(page: bytes, names: Sequence[str]) -> Samples:
    """Name -> (labels, value) of each sample whose name is one of `names`."""
    wanted = b"|".join(re.escape(name.encode()) for name in names)
    line = re.compile(rb"^(" + wanted + rb")(?:\{(.*)\})? ([^ \r\n]+)", re.MULTILINE)
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for name, labels, value in line.findall(page):
        try:
            sample = (dict(_LABEL.findall(labels.decode(errors="replace"))), float(value))
        except ValueError:
            continue
        found.setdefault(name.decode(), []).append(sample)
    return found


def vllm_load(page: bytes) -> LoadReport | None:
    """vLLM's own figures; several engines (data parallel) are added up."""
    found = samples(page, _VLLM)
    if "vllm:num_requests_running" not in found:
        return None
    sizes = [_cache_tokens(labels) for labels, _ in found.get("vllm:cache_config_info", ())]
    usage = found.get("vllm:kv_cache_usage_perc") or found.get("vllm:gpu_cache_usage_perc")
    return LoadReport(
        running=round(_sum(found, "vllm:num_requests_running")),
        waiting=round(_sum(found, "vllm:num_requests_waiting")),
        kv_usage=sum(value for _, value in usage) / len(usage) if usage else None,
        capacity_tokens=sum(filter(None, sizes)) or None,
    )


def sglang_load(page: bytes) -> LoadReport | None:
    """SGLang's, where it runs with --enable-metrics: ranks of data parallelism are added up."""
    found = samples(page, _SGLANG)
    if "sglang:num_running_reqs" not in found:
        return None
    usage = found.get("sglang:token_usage")
    return LoadReport(
        running=round(_sum(found, "sglang:num_running_reqs")),
        waiting=round(_sum(found, "sglang:num_queue_reqs")),
        kv_usage=sum(value for _, value in usage) / len(usage) if usage else None,
        capacity_tokens=round(_sum(found, "sglang:max_total_num_tokens")) or None,
    )


def _cache_tokens(labels: Mapping[str, str]) -> int | None:
    """Of one engine: blocks times tokens of a block. Both are "None" until it has measured."""
    blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
    return int(blocks) * int(size) if blocks.isdigit() and size.isdigit() else None


def _sum(found: Samples, name: str) -> float:
    return sum(value for _, value in found.get(name, ()))
