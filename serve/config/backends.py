"""One backend: an engine in this process, or a server and how to reach it."""

import os
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    SecretStr,
    Tag,
    field_validator,
)

from octet.artifacts.live import Counting
from octet.errors import ConfigError, nearest
from serve.config.section import Count, Integer, Name, Seconds, Section, tag

__all__ = [
    "BackendConfig",
    "EmbeddedConfig",
    "HttpConfig",
    "ManagedConfig",
    "TritonConfig",
    "key_in",
]


def _of_a_header(key: str) -> str:
    """Returns `key` without the line end that a file or a Docker secret leaves there.

    Raises ValueError, which does not contain the key, if no `Authorization` header can hold it.
    """
    key = key.removesuffix("\n").removesuffix("\r")
    if not key:
        raise ValueError("is empty")
    if not (key.isascii() and key.isprintable()):
        raise ValueError("holds a line end, a control character or one that is not ASCII")
    return key


def key_in(variable: str | None) -> SecretStr | None:
    """Returns the key in an environment variable. Raises ConfigError if it holds none."""
    if variable is None:
        return None
    if variable not in os.environ:
        raise ConfigError(f"the environment variable {variable} with the API key is not set")
    try:
        return SecretStr(_of_a_header(os.environ[variable]))
    except ValueError as error:
        raise ConfigError(f"the API key in the environment variable {variable} {error}") from None


def _secret(key: SecretStr) -> SecretStr:
    return SecretStr(_of_a_header(key.get_secret_value()))


class _Backend(Section):
    name: Name | None = None  # in metrics, logs and errors; default: the pool's name and a number
    max_in_flight: Count | None = None  # requests; beyond it, they go to other backends


class CountConfig(Section):
    """Counts the activations of a share of the steps, for `octet drift`."""

    directory: Path
    one_step_in: Count = 100
    window_tokens: Count = 4096  # counted tokens, after which a file is written

    @property
    def options(self) -> Counting:
        return Counting(self.directory, self.one_step_in, self.window_tokens)


class EmbeddedConfig(_Backend):
    """An ONNX export, or a TensorRT engine, run in this process."""

    type: Literal["embedded"]
    path: Path
    # Requests decoded together; default: 16, or what an engine was built for.
    slots: Count | None = None
    # Tokens of prompt and answer together; default: the model's, or what an engine was built for.
    context: Count | None = None
    threads: Annotated[Integer, Field(ge=0)] = 0  # of one operator; 0: one per usable core
    count: CountConfig | None = None


class HttpConfig(_Backend):
    """A server that speaks OpenAI's protocol: its bytes pass through.

    `vllm` is read through vLLM's /health, /metrics and /load. `openai` is any other: SGLang,
    TensorRT-LLM's trtllm-serve, Dynamo.
    """

    type: Literal["vllm", "openai"]
    url: str  # without /v1
    model: str | None = None  # its name on the server; default: the public name
    # For `Authorization`; write it as ${VARIABLE}.
    api_key: Annotated[SecretStr, AfterValidator(_secret)] | None = None
    connect_timeout_s: Seconds = 2.0

    @field_validator("url")
    @classmethod
    def _is_a_base_url(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError("must start with http:// or https://")
        if not _has_host_and_port(url):
            raise ValueError("must name a host, and a port of 1 to 65535 if any")
        parts = urlsplit(url)
        if "@" in parts.netloc:
            raise ValueError("must hold no user or password: put the secret into api_key")
        if parts.query or parts.fragment:
            raise ValueError("must end before any '?' or '#': paths are added to it")
        return url.rstrip("/").removesuffix("/v1")

    def key(self) -> str | None:
        """Returns the key for `Authorization`."""
        return None if self.api_key is None else self.api_key.get_secret_value()


class ManagedConfig(_Backend):
    """A vLLM that the gateway starts on a checkpoint, restarts when it ends, and stops."""

    type: Literal["vllm"]
    artifact: Path  # what `octet export checkpoint` wrote, or an unquantized checkpoint
    python: Path | None = None  # of the environment that has vLLM
    command: str | None = None  # instead of `python`; default: `vllm`, or this environment's
    options: tuple[str, ...] = ()  # of `vllm serve`, after those that Octet chooses; they win
    environment: dict[str, str] = Field(default_factory=dict)  # more variables for vLLM
    model: str | None = None  # the name that vLLM gives it; default: the export's
    weight_only: bool = False  # never rounds activations, even where the GPU could (Marlin)
    # Compiling kernels can take minutes; after this, vLLM is taken to hang, and started again.
    start_timeout_s: Seconds = 1200.0


class TritonConfig(_Backend):
    """A decoupled model of a Triton server, over gRPC streaming."""

    type: Literal["triton"]
    url: str  # host:port of the gRPC endpoint
    model: str | None = None
    # Directory of the tokenizer's files, for chat templates and for token ids sent as text.
    tokenizer: Path | None = None
    metrics_url: str | None = None  # such as http://host:8002/metrics, for queue and KV usage
    connect_timeout_s: Seconds = 2.0

    @field_validator("metrics_url")
    @classmethod
    def _is_whole(cls, url: str | None) -> str | None:
        if url is not None and not (
            url.startswith(("http://", "https://")) and _has_host_and_port(url)
        ):
            raise ValueError("must be a whole URL, such as http://127.0.0.1:8002/metrics")
        return url

    @field_validator("url")
    @classmethod
    def _is_host_and_port(cls, url: str) -> str:
        address = url.removeprefix("grpc://")
        if not _has_host_and_port(f"grpc://{address}", needs_port=True) or "/" in address:
            raise ValueError("must be host:port, such as 127.0.0.1:8001")
        return address


def _has_host_and_port(url: str, needs_port: bool = False) -> bool:
    if not url.isprintable() or " " in url:  # urlsplit would remove some of these characters
        return False
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0 and bool(parts.port or not needs_port)
    except ValueError:  # a port that is not a number, or an unclosed bracket
        return False


_KINDS: dict[str, type[Section]] = {
    "embedded": EmbeddedConfig,
    "vllm": HttpConfig,
    "openai": HttpConfig,
    "triton": TritonConfig,
}


def _kind_of(value: dict[str, Any]) -> type[Section]:
    """Returns the section of a backend; a `vllm` with an artifact is one that is started here."""
    if value["type"] == "vllm" and "artifact" in value:
        return ManagedConfig
    return _KINDS[value["type"]]


def _has_a_kind(value: Any) -> Any:
    if isinstance(value, Section):
        return value
    if not isinstance(value, dict):
        raise ValueError("should be a section with a backend's keys")
    kind = value.get("type")
    if kind is None:
        raise ValueError(f"needs a type; known: {', '.join(sorted(_KINDS))}")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"unknown backend '{kind}'{nearest(str(kind), _KINDS)}")
    return value


def _section_of(value: Any) -> str:
    section = type(value) if isinstance(value, Section) else _kind_of(value)
    return tag(section)


BackendConfig = Annotated[
    Annotated[EmbeddedConfig, Tag(tag(EmbeddedConfig))]
    | Annotated[HttpConfig, Tag(tag(HttpConfig))]
    | Annotated[ManagedConfig, Tag(tag(ManagedConfig))]
    | Annotated[TritonConfig, Tag(tag(TritonConfig))],
    Discriminator(_section_of),
    BeforeValidator(_has_a_kind),
]
