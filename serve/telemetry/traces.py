"""Tracing, where the configuration asks for it; else OpenTelemetry's SDK is not even imported."""

from abc import ABC, abstractmethod
from urllib.parse import urlsplit

from octet.errors import ConfigError
from serve.config.telemetry import Traces
from serve.telemetry.observation import Observation, Trace

__all__ = ["Tracing"]


class Tracing(ABC):
    """Makes the spans of each request."""

    @staticmethod
    def from_config(config: Traces) -> "Tracing | None":
        """None without an endpoint. Raises ConfigError for one that is no URL, or a library that
        is missing."""
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
                f"traces.endpoint: needs {error.name}: pip install 'octet[traces]'"
            ) from None
        return SpanTracing.over_http(config.endpoint, config.sample)

    @abstractmethod
    def begin(self, observation: Observation, method: str, path: str) -> Trace:
        """The span of a request that has just arrived, within its client's trace if it has one."""

    @abstractmethod
    def close(self) -> None:
        """Sends what is left. Waits for it, at most a few seconds."""
