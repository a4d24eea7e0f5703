"""What a server of OpenAI's protocol says of itself: how busy it is, how long its context."""

import json
from collections.abc import Callable

from serve.backends.base import LoadReport
from serve.backends.prometheus import load_of

__all__ = ["LOAD_SOURCES", "context_length"]


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
