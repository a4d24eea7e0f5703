"""One public model name: which pools answer for it, in which order and shares."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from serve.config.pools import PoolConfig
from serve.config.section import Fraction, Name, Section

__all__ = ["Canary", "ModelConfig", "Shadow"]


class Canary(Section):
    """A part of the traffic goes to another pool, and falls back to the main one."""

    pool: Name
    fraction: Fraction


class Shadow(Section):
    """Copies of a part of the requests; their answers are read, measured and thrown away."""

    pool: Name
    fraction: Fraction = 1.0
    max_in_flight: Annotated[int, Field(gt=0)] = 16  # beyond it, nothing is copied


def _from_list(value: Any) -> Any:
    return {"backends": value} if isinstance(value, list | tuple) else value


# The name of a pool, a pool written in place, or just the list of its backends.
PoolRef = Annotated[Name | PoolConfig, BeforeValidator(_from_list)]


class ModelConfig(Section):
    pool: PoolRef
    aliases: tuple[Name, ...] = ()
    canary: tuple[Canary, ...] = ()
    shadow: Shadow | None = None
    fallback: tuple[Name, ...] = ()  # pools to ask, in this order, when `pool` cannot answer
