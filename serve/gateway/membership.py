"""Whether a backend may join a pool that is already at work."""

from collections.abc import Iterable, Sequence

from octet.errors import ConfigError
from serve.config import BackendConfig
from serve.config.checks import needs_model
from serve.routing import Member

__all__ = ["refuse_unfit"]


def refuse_unfit(config: BackendConfig, members: Iterable[Member], models: Sequence[str]) -> None:
    """Raises ConfigError for a name that one of `members` has, or a model that nobody says."""
    if config.name is not None and any(member.name == config.name for member in members):
        raise ConfigError(f"the pool has a backend named '{config.name}' already")
    if problem := needs_model(config, models):
        raise ConfigError(problem)
