"""One backend: an engine in this process, or a server and how to reach it."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from serve.config.section import Count, Name, Seconds, Section

__all__ = ["BackendConfig", "EmbeddedConfig", "HttpConfig", "TritonConfig"]


class _Backend(Section):
    name: Name | None = None  # in metrics, logs and errors; else the pool's name and a number
    max_in_flight: Count | None = None  # requests; beyond it others are asked


class EmbeddedConfig(_Backend):
    """An ONNX export, or a TensorRT engine, run in this process."""

    type: Literal["embedded"]
    path: Path
    # Requests decoded together; 16, or what an engine was built for.
    slots: Count | None = None
    # Tokens of prompt and answer together; what the model has, or an engine was built for.
    context: Count | None = None
    threads: Annotated[int, Field(ge=0)] = 0  # of one operator on the CPU; 0: one per core
    max_waiting: Count = 1024  # requests


class HttpConfig(_Backend):
    """A server that speaks OpenAI's protocol: its bytes pass through.

    `vllm` is read as vLLM writes: /health, /metrics, /load. `openai` is any other: SGLang,
    TensorRT-LLM's trtllm-serve, Dynamo.
    """

    type: Literal["vllm", "openai"]
    url: str  # without /v1
    model: str | None = None  # the name the server knows; the public name if left out
    api_key: str | None = None  # for `Authorization`; write it as ${VARIABLE}
    api_key_env: str | None = None  # or the name of the environment variable that holds it
    connect_timeout_s: Seconds = 2.0

    @field_validator("url")
    @classmethod
    def _is_a_base_url(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError("must start with http:// or https://")
        return url.rstrip("/").removesuffix("/v1")


class TritonConfig(_Backend):
    """A decoupled model of a Triton server, over gRPC streaming."""

    type: Literal["triton"]
    url: str  # host:port of the gRPC endpoint
    model: str | None = None
    # A directory with the tokenizer's files: for chat templates, and token ids sent as text.
    tokenizer: Path | None = None
    connect_timeout_s: Seconds = 2.0

    @field_validator("url")
    @classmethod
    def _is_host_and_port(cls, url: str) -> str:
        host, _, port = url.removeprefix("grpc://").rpartition(":")
        if not host or not port.isdigit():
            raise ValueError("must be host:port, such as 127.0.0.1:8001")
        return f"{host}:{port}"


BackendConfig = Annotated[EmbeddedConfig | HttpConfig | TritonConfig, Field(discriminator="type")]
