"""What a server of OpenAI's protocol says of itself: how busy it is, how long its context."""

import json
from collections.abc import Callable

from serve.backends.base import Incarnation, LoadReport
from serve.backends.prometheus import load_of, samples

__all__ = ["LOAD_SOURCES", "context_length", "incarnation"]

_STARTED = "process_start_time_seconds"  # of every Prometheus client library
_GROWING = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")


def _server_load(body: bytes) -> LoadReport | None:
    """vLLM's /load, with --enable-server-load-tracking: requests that it has, running or not."""
    try:
        return LoadReport(int(json.loads(body)["server_load"]), 0, None, None)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


Source = tuple[str, Callable[[bytes], LoadReport | None]]
LOAD_SOURCES: tuple[Source, ...] = (
    ("/metrics", load_of),
    ("/prometheus/metrics", load_of),  # trtllm-serve
    ("/load", _server_load),
)


def context_length(body: bytes, served_name: str) -> int | None:
    """`max_model_len` of the model, as vLLM and SGLang list it; None where it is not given."""
    try:
        models = json.loads(body)["data"]
        lengths = {model["id"]: model.get("max_model_len") for model in models}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    length = lengths.get(served_name)
    return length if isinstance(length, int) else None


def incarnation(models: bytes, metrics: bytes, served_name: str) -> Incarnation | None:
    """By /v1/models and the Prometheus page (empty: it has none); None for no list of models.

    vLLM names the checkpoint (`root`) and the context that it was started with. Its counters are
    for where several processes answer, whose page has no start time.
    """
    try:
        cards = {card["id"]: card for card in json.loads(models)["data"]}
        card = cards.get(served_name, {})
        settings = tuple(f"{key}={card.get(key)}" for key in ("root", "max_model_len"))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    found = samples(metrics, (_STARTED, *_GROWING))
    started = max((value for _, value in found.get(_STARTED, ())), default=None)
    counts = (round(sum(v for _, v in found[name])) for name in _GROWING if name in found)
    return Incarnation(settings, started, tuple(counts))
