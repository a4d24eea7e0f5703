"""Starts tracing if the configuration enables it; else OpenTelemetry's SDK is not imported."""

from urllib.parse import urlsplit

from octet.errors import ConfigError
from serve.config.gateway import Traces
from serve.telemetry.observation import Tracing

__all__ = ["tracing_from"]


def tracing_from(config: Traces) -> Tracing | None:
    """Returns None without an endpoint.

    Raises ConfigError if the endpoint is not a URL, or a library is missing.
    """
    if config.endpoint is None:
        return None
    url = urlsplit(config.endpoint)
    if url.scheme not in ("http", "https") or not url.netloc:
        raise ConfigError(
            f"traces.endpoint: '{config.endpoint}' should be a URL such as "
            "http://127.0.0.1:4318 (OTLP over HTTP)"
        )
    try:
        from serve.telemetry.spans import SpanTracing
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"traces.endpoint: needs {error.name}: pip install 'octet-llm[traces]'"
        ) from None
    return SpanTracing.over_http(config.endpoint, config.sample)
