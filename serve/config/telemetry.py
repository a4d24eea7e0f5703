"""Logs and traces. Metrics are always on."""

from typing import Literal

from serve.config.section import Fraction, Section

__all__ = ["Logs", "Traces"]


class Logs(Section):
    """Logs, written to standard error."""

    format: Literal["text", "json"] = "text"
    access: bool = False  # one line per request
    prompts: bool = False  # its prompt too


class Traces(Section):
    """OpenTelemetry spans, over OTLP/HTTP; needs `pip install 'octet-llm[traces]'`."""

    endpoint: str | None = None  # such as http://127.0.0.1:4318; null: none
    sample: Fraction = 1.0
