"""One public model name, and the pools that serve it: their order and shares."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from serve.config.pools import PoolConfig
from serve.config.section import Count, Fraction, Name, Number, Section, tag

__all__ = ["Canary", "CaptureConfig", "ModelConfig", "Shadow"]


class Canary(Section):
    """Sends a part of the traffic to another pool, with the main one as fallback."""

    pool: Name
    fraction: Fraction


class Shadow(Section):
    """Copies a part of the requests to another pool; its answers are measured and discarded."""

    pool: Name
    fraction: Fraction = 1.0
    max_in_flight: Count = 16  # beyond it, nothing is copied


def _pattern(value: str) -> str:
    import regex  # with a limit of time, unlike re

    try:
        pattern = regex.compile(value)
    except (regex.error, RecursionError, OverflowError) as error:
        raise ValueError(f"is no regular expression of Python: {error}") from None
    if pattern.search(""):
        raise ValueError("matches an empty text, so it would be everywhere")
    return value


class CaptureConfig(Section):
    """Keeps a share of the requests and answers, redacted, as samples for a calibration."""

    file: Path  # JSON lines; several processes may share it, but not several models
    share: Annotated[Number, Field(gt=0, le=1)] = 0.01  # of the requests
    max_mb: Count = 100  # of the file: then every second line is dropped, and the share halves
    redact: tuple[Annotated[str, AfterValidator(_pattern)], ...] = ()  # regular expressions


def _from_list(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return {"backends": value}
    if not isinstance(value, str | dict | PoolConfig):
        raise ValueError("should be the name of a pool, a pool's section, or a list of backends")
    return value


def _form(value: Any) -> str:
    return "<name>" if isinstance(value, str) else tag(PoolConfig)


# The name of a pool, a pool written in place, or just the list of its backends.
PoolRef = Annotated[
    Annotated[Name, Tag("<name>")] | Annotated[PoolConfig, Tag(tag(PoolConfig))],
    Discriminator(_form),
    BeforeValidator(_from_list),
]


class ModelConfig(Section):
    pool: PoolRef
    aliases: tuple[Name, ...] = ()
    canary: tuple[Canary, ...] = ()
    shadow: Shadow | None = None
    capture: CaptureConfig | None = None  # off
    fallback: tuple[Name, ...] = ()  # pools to use, in this order, when `pool` cannot answer
    # Starts `pool` alone, and each fallback only when the one before cannot serve and was stopped.
    one_at_a_time: bool = False
    # Tier of requests that name none; null: `pool`, then `fallback`, whatever their divergence.
    tier: Name | None = None
    # Further public names, each for one tier: {llama-exact: exact}.
    tier_aliases: dict[Name, Name] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _is_a_section(cls, value: Any) -> Any:
        if isinstance(value, list | tuple):
            raise ValueError("should be a section; the list of backends belongs under `pool:`")
        if isinstance(value, str):
            raise ValueError(f"should be a section, such as {{pool: {value}}}")
        return value

    def in_order(self, own: str) -> tuple[str, ...]:
        """Lists the pools that answer in turn: `pool`, then `fallback`."""
        return (self.pool if isinstance(self.pool, str) else own, *self.fallback)

    def pool_names(self, own: str) -> tuple[str, ...]:
        """Lists every pool that its requests may go to; one written in place is called `own`."""
        shadow = () if self.shadow is None else (self.shadow.pool,)
        return (*self.answering(own), *shadow)

    def answering(self, own: str) -> tuple[str, ...]:
        """Lists the pools whose answers clients get: all but the shadow's."""
        main = self.pool if isinstance(self.pool, str) else own
        return (main, *(canary.pool for canary in self.canary), *self.fallback)
