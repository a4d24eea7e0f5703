"""The gateway's configuration file: YAML, validated whole before anything starts."""

from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import Field, ValidationError

from octet.errors import ConfigError, nearest
from serve.config.access import Access, Admin, KeyConfig
from serve.config.backends import EmbeddedConfig, HttpConfig, TritonConfig
from serve.config.models import Canary, ModelConfig, Shadow
from serve.config.pools import (
    Admission,
    DnsDiscovery,
    Ejection,
    FileDiscovery,
    Health,
    PoolConfig,
    Retries,
    Routing,
    Timeouts,
)
from serve.config.section import Count, Name, Section
from serve.config.telemetry import Logs, Traces

__all__ = ["GatewayConfig", "Limits", "Listen"]


class Listen(Section):
    """Where to accept connections; port 0 takes a free one."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000


class Limits(Section):
    """What one request may ask for; beyond it is a 400, a 413 for the body, a 431 for headers."""

    max_body_bytes: Count = 16 * 1024 * 1024
    max_header_bytes: Count = 64 * 1024  # of all header fields of a request together
    max_prompt_tokens: Count | None = None  # as estimated before a backend counts them
    max_n: Count = 16  # choices of each prompt
    max_prompts: Count = 64
    max_choices: Count = 128  # prompts times n
    max_stop: Count = 16  # stop strings
    max_logprobs: Annotated[int, Field(ge=0)] = 20  # alternatives at each position
    max_connections: Count = 4096
    max_memory_bytes: Count | None = None  # of this process; null: 80 % of what its cgroup may use
    read_timeout_s: Annotated[float, Field(gt=0)] = 30.0  # for the headers, then for the body
    write_timeout_s: Annotated[float, Field(gt=0)] = 60.0  # a client that takes nothing for so long


class GatewayConfig(Section):
    """The whole file."""

    listen: Listen = Listen()
    limits: Limits = Limits()
    # After the first SIGINT or SIGTERM, running requests have this long to finish.
    drain_timeout_s: Annotated[float, Field(ge=0)] = 30.0
    access: Access = Access()
    admin: Admin = Admin()
    logs: Logs = Logs()
    traces: Traces = Traces()
    pools: dict[Name, PoolConfig] = Field(default_factory=dict)
    models: Annotated[dict[Name, ModelConfig], Field(min_length=1)]

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

    @property
    def all_pools(self) -> dict[str, PoolConfig]:
        """By name; a pool written in a model's own section has that model's name."""
        inline = {
            name: model.pool
            for name, model in self.models.items()
            if isinstance(model.pool, PoolConfig)
        }
        return self.pools | inline

    def _relative_to(self, directory: Path) -> Self:
        def resolve(value: Any) -> Any:
            """`value` with each Path in it taken from `directory`."""
            if isinstance(value, Path):
                return directory / value
            if isinstance(value, Section):
                fields = {name: resolve(getattr(value, name)) for name in type(value).model_fields}
                return value.model_copy(update=fields)
            if isinstance(value, tuple):
                return tuple(map(resolve, value))
            if isinstance(value, dict):
                return {key: resolve(item) for key, item in value.items()}
            return value

        resolved: Self = resolve(self)
        return resolved


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


_SECTIONS = (
    *(GatewayConfig, Listen, Limits, Access, KeyConfig, Admin, Logs, Traces),
    *(PoolConfig, Routing, Health, Ejection, Retries, Timeouts, Admission),
    *(DnsDiscovery, FileDiscovery, ModelConfig, Canary, Shadow),
    *(EmbeddedConfig, HttpConfig, TritonConfig),
)
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
