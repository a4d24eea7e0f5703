"""Who may ask, for what, how often; and who may administer."""

from datetime import datetime
from pathlib import Path
from typing import Annotated

from pydantic import Field

from serve.config.section import Count, Digest, Name, Section

__all__ = ["Access", "Admin", "KeyConfig"]


class KeyConfig(Section):
    """One API key. The key itself is nowhere in the file: `octet keys new` prints both."""

    name: Name  # in metrics and logs
    sha256: Digest
    models: tuple[Name, ...] | None = None  # public names, or aliases; null: all
    priority: Annotated[int, Field(ge=-100, le=100)] = 0  # higher goes first
    weight: Annotated[float, Field(gt=0)] = 1.0  # share of the tokens within its priority
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    tokens_per_day: Count | None = None  # quota; the day is UTC's
    max_in_flight: Count | None = None  # requests
    expires: datetime | None = None


class Access(Section):
    """Without keys, everybody who can reach the address may ask."""

    keys: tuple[KeyConfig, ...] = ()
    keys_file: Path | None = None  # a YAML list of more keys
    usage_file: Path | None = None  # where quotas are remembered across restarts
    cors_origins: tuple[str, ...] = ()


class Admin(Section):
    """/status, /metrics and /admin on an address of their own, or /admin by a key of its own."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] | None = None
    sha256: Digest | None = None  # of the key for `Authorization: Bearer`
