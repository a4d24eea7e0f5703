"""The gateway's configuration file: YAML, validated whole before anything starts."""

from typing import Annotated, Literal, Self

from pydantic import Field

from serve.config.access import Access, Admin, KeyConfig
from serve.config.load import load
from serve.config.models import ModelConfig
from serve.config.pools import PoolConfig
from serve.config.proof import Tier
from serve.config.ray import RayConfig
from serve.config.section import Count, Fraction, Integer, Name, Number, Port, Seconds, Section

__all__ = ["MAX_ANSWER", "GatewayConfig", "Limits", "Listen", "Logs", "Traces"]


class Logs(Section):
    """Logs, written to standard error."""

    format: Literal["text", "json"] = "text"
    access: bool = False  # one line per request
    prompts: bool = False  # its prompt too


class Traces(Section):
    """OpenTelemetry spans, over OTLP/HTTP; needs `pip install 'octet-llm[traces]'`."""

    endpoint: str | None = None  # such as http://127.0.0.1:4318; null: none
    sample: Fraction = 1.0


class Listen(Section):
    """The address to accept connections on; port 0 takes a free one."""

    host: str = "127.0.0.1"
    port: Port = 8000


MAX_ANSWER = 32 * 1024 * 1024  # bytes


class Limits(Section):
    """Limits of requests; a request beyond them gets a 400, 413 (body) or 431 (headers)."""

    max_body_bytes: Count = 16 * 1024 * 1024
    max_header_bytes: Count = 64 * 1024  # of all header fields of a request together
    max_answer_bytes: Count = MAX_ANSWER  # of an answer that is not streamed; beyond it: 502
    max_prompt_tokens: Count | None = None  # as estimated before a backend counts them
    max_n: Count = 16  # choices of each prompt
    max_prompts: Count = 64
    max_choices: Count = 128  # prompts times n
    max_logprobs: Annotated[Integer, Field(ge=0)] = 20  # alternatives at each position
    max_connections: Count = 4096
    max_memory_bytes: Count | None = None  # of this process; null: 80 % of what its cgroup may use
    read_timeout_s: Seconds = 30.0  # for the headers, then for the body
    write_timeout_s: Seconds = 60.0  # for a client that reads nothing


class GatewayConfig(Section):
    """The whole file."""

    listen: Listen = Listen()
    limits: Limits = Limits()
    # After the first SIGINT or SIGTERM, running requests have this long to finish.
    drain_timeout_s: Annotated[Number, Field(ge=0)] = 30.0
    access: Access = Access()
    admin: Admin = Admin()
    logs: Logs = Logs()
    traces: Traces = Traces()
    tiers: dict[Name, Tier] = Field(default_factory=dict)  # the most exact first
    pools: dict[Name, PoolConfig] = Field(default_factory=dict)
    models: Annotated[dict[Name, ModelConfig], Field(min_length=1)]
    ray: RayConfig = RayConfig()

    @property
    def all_pools(self) -> dict[str, PoolConfig]:
        """All pools by name; a pool written in a model's own section has that model's name."""
        inline = {
            name: model.pool
            for name, model in self.models.items()
            if isinstance(model.pool, PoolConfig)
        }
        return self.pools | inline

    @property
    def one_at_a_time(self) -> dict[str, PoolConfig]:
        """The pools of models that start one pool at a time."""
        pools = self.all_pools
        return {
            pool: pools[pool]
            for name, model in self.models.items()
            if model.one_at_a_time
            for pool in model.in_order(name)
        }

    def without_proof(self) -> Self:
        """Returns a copy in which no backend has to be proven: `octet serve --no-proof`."""

        def unasked(pool: PoolConfig) -> PoolConfig:
            proof = pool.proof.model_copy(update={"enabled": False})
            return pool.model_copy(update={"proof": proof})

        pools = {name: unasked(pool) for name, pool in self.pools.items()}
        models = {
            name: model.model_copy(update={"pool": unasked(model.pool)})
            if isinstance(model.pool, PoolConfig)
            else model
            for name, model in self.models.items()
        }
        return self.model_copy(update={"pools": pools, "models": models})

    def models_of(self, pool: str) -> list[str]:
        """Lists the public names of the models that may send requests to `pool`.

        Those include the requests of a judge.
        """
        pools = self.all_pools
        judges = {name: p.judge.reference for name, p in pools.items() if p.judge is not None}
        return [
            name
            for name, model in self.models.items()
            for used in [model.pool_names(name)]
            if pool in used or pool in map(judges.get, used)
        ]

    def with_keys_file(self) -> Self:
        """Returns a copy with the keys of `access.keys_file` added."""
        if self.access.keys_file is None:
            return self
        more = load(self.access.keys_file, tuple[KeyConfig, ...], KeyConfig)
        access = self.access.model_copy(update={"keys": (*self.access.keys, *more)})
        return self.model_copy(update={"access": access})
