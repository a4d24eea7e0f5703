"""The gateway's configuration file: YAML, validated whole before anything starts."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from octet.errors import ConfigError, nearest

__all__ = [
    "BackendConfig",
    "EmbeddedConfig",
    "GatewayConfig",
    "HttpConfig",
    "Limits",
    "Listen",
    "ModelConfig",
    "TritonConfig",
]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Listen(_Section):
    """Where to accept connections; port 0 takes a free one."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000


class Limits(_Section):
    """What one request may ask for; beyond it is a 400, or a 413 for the body."""

    max_body_bytes: Annotated[int, Field(gt=0)] = 16 * 1024 * 1024
    max_n: Annotated[int, Field(gt=0)] = 16  # choices of each prompt
    max_prompts: Annotated[int, Field(gt=0)] = 64
    max_choices: Annotated[int, Field(gt=0)] = 128  # prompts times n
    max_stop: Annotated[int, Field(gt=0)] = 16  # stop strings
    max_logprobs: Annotated[int, Field(ge=0)] = 20  # alternatives at each position


class EmbeddedConfig(_Section):
    """An ONNX export, or a TensorRT engine, run in this process."""

    type: Literal["embedded"]
    path: Path
    # Requests decoded together; 16, or what an engine was built for.
    slots: Annotated[int, Field(gt=0)] | None = None
    # Tokens of prompt and answer together; what the model has, or an engine was built for.
    context: Annotated[int, Field(gt=0)] | None = None


class HttpConfig(_Section):
    """A server that speaks OpenAI's protocol: its bytes pass through."""

    type: Literal["vllm", "openai"]
    url: str  # without /v1
    model: str | None = None  # the name the server knows; the public name if left out
    api_key_env: str | None = None  # environment variable with the key for `Authorization`
    connect_timeout_s: Annotated[float, Field(gt=0)] = 2.0
    idle_timeout_s: Annotated[float, Field(gt=0)] = 600.0  # longest silence of a running answer

    @field_validator("url")
    @classmethod
    def _is_a_base_url(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError("must start with http:// or https://")
        return url.rstrip("/").removesuffix("/v1")


class TritonConfig(_Section):
    """A decoupled model of a Triton server, over gRPC streaming."""

    type: Literal["triton"]
    url: str  # host:port of the gRPC endpoint
    model: str | None = None
    # A directory with the tokenizer's files: for chat templates, and token ids sent as text.
    tokenizer: Path | None = None
    connect_timeout_s: Annotated[float, Field(gt=0)] = 2.0

    @field_validator("url")
    @classmethod
    def _is_host_and_port(cls, url: str) -> str:
        host, _, port = url.removeprefix("grpc://").rpartition(":")
        if not host or not port.isdigit():
            raise ValueError("must be host:port, such as 127.0.0.1:8001")
        return f"{host}:{port}"


BackendConfig = Annotated[EmbeddedConfig | HttpConfig | TritonConfig, Field(discriminator="type")]


class ModelConfig(_Section):
    """One public model name, and the backends that take turns to answer for it."""

    pool: Annotated[tuple[BackendConfig, ...], Field(min_length=1)]


class GatewayConfig(_Section):
    """The whole file."""

    listen: Listen = Listen()
    limits: Limits = Limits()
    # After the first SIGINT or SIGTERM, running requests have this long to finish.
    drain_timeout_s: Annotated[float, Field(ge=0)] = 30.0
    access_log: bool = False  # one JSON line a request, on standard error
    models: Annotated[dict[str, ModelConfig], Field(min_length=1)]

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads and validates `path`; relative paths in it are taken from its directory.

        Raises ConfigError with one line: the file, the key, and what is wrong with it.
        """
        try:
            data = yaml.load(path.read_text(), Loader=_UniqueKeys)
            config = cls.model_validate(data)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8 text"
            raise ConfigError(f"configuration {path}: {reason}") from None
        except yaml.YAMLError as error:
            raise ConfigError(f"configuration {path}: {' '.join(str(error).split())}") from None
        except ValidationError as error:
            raise ConfigError(f"configuration {path}: {_first_problem(error)}") from None
        return config._relative_to(path.resolve().parent)

    def _relative_to(self, directory: Path) -> Self:
        def resolve(backend: Any) -> Any:
            paths = {
                name: directory / value
                for name in ("path", "tokenizer")
                if (value := getattr(backend, name, None)) is not None
            }
            return backend.model_copy(update=paths)

        models = {
            name: ModelConfig(pool=tuple(resolve(backend) for backend in model.pool))
            for name, model in self.models.items()
        }
        return self.model_copy(update={"models": models})


class _UniqueKeys(yaml.SafeLoader):
    """YAML lets a repeated key replace the first in silence; here it is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode):
                if key_node.value in seen:
                    line = key_node.start_mark.line + 1
                    raise yaml.YAMLError(f"line {line}: the key '{key_node.value}' is repeated")
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


_SECTIONS = (Listen, Limits, EmbeddedConfig, HttpConfig, TritonConfig, ModelConfig, GatewayConfig)
_KNOWN_KEYS = frozenset(name for section in _SECTIONS for name in section.model_fields)


def _first_problem(error: ValidationError) -> str:
    """One line for the first problem, by the path of its key; the innermost one if nested."""
    first = error.errors(include_url=False)[0]
    kinds = {"embedded", "vllm", "openai", "triton"}  # the union's tags are no keys of the file
    parts = [str(part) for part in first["loc"]]
    where = ".".join(p for i, p in enumerate(parts) if not (p in kinds and i >= 4)) or "top level"
    if first["type"] == "extra_forbidden":
        return f"{where}: unknown key{nearest(parts[-1], _KNOWN_KEYS)}"
    if first["type"] == "union_tag_invalid":
        tag = first.get("ctx", {}).get("tag", "")
        return f"{where}.type: unknown backend '{tag}'{nearest(str(tag), kinds)}"
    if first["type"] == "union_tag_not_found":
        return f"{where}: needs a type; known: {', '.join(sorted(kinds))}"
    if first["type"] == "missing":
        return f"{where}: missing"
    message = first["msg"].removeprefix("Value error, ").replace("Input should", "should")
    return f"{where}: {message}"
