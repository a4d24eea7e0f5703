"""Replicas under Ray Serve: `octet deploy ray`. `octet serve` ignores this section."""

from typing import Annotated

from pydantic import Field, model_validator

from serve.config.section import Count, Integer, Name, Number, Seconds, Section

__all__ = ["RayConfig", "RayEngines"]


class RayEngines(Section):
    """The replicas of each engine of one pool: how many, and what each of them needs."""

    min_replicas: Count = 1
    max_replicas: Count = 1
    # Outstanding tokens that one replica should have: those of each prompt and of its longest
    # possible answer, queued or in progress. Ray starts replicas above it, and stops them below.
    tokens_per_replica: Count = 8192
    # How long the load, a mean over 30 s, must be above or below that.
    upscale_delay_s: Seconds = 30.0
    downscale_delay_s: Seconds = 600.0
    cpus: Annotated[Number, Field(gt=0)] = 1.0
    # Of one machine. Null: for vLLM, the artifact's tensor parallelism; for an embedded engine, 0.
    gpus: Annotated[Integer, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _is_a_range(self) -> "RayEngines":
        if self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas is {self.max_replicas}, and min_replicas {self.min_replicas}"
            )
        return self


class RayConfig(Section):
    """The application on a Ray cluster."""

    gateways: Count = 1  # replicas of the gateway
    gateway_cpus: Annotated[Number, Field(gt=0)] = 1.0  # of each
    engines: dict[Name, RayEngines] = Field(default_factory=dict)  # by pool
