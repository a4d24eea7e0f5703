"""Who may ask, for what, how often; and who may administer."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from serve.config.section import Count, Digest, Integer, Name, Number, Port, Section

__all__ = ["Access", "Admin", "KeyConfig"]


def _in_utc(moment: datetime) -> datetime:
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


class KeyConfig(Section):
    """One API key. The key itself is nowhere in the file: `octet keys new` prints both."""

    name: Name  # in metrics and logs
    sha256: Digest
    models: tuple[Name, ...] | None = None  # public names, or aliases; null: all
    priority: Annotated[Integer, Field(ge=-100, le=100)] = 0  # higher goes first
    weight: Annotated[Number, Field(gt=0)] = 1.0  # share of the tokens within its priority
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    tokens_per_day: Count | None = None  # quota; the day is UTC's
    max_in_flight: Count | None = None  # requests
    expires: Annotated[datetime, AfterValidator(_in_utc)] | None = None  # UTC, if it says no other


class Access(Section):
    """Without keys, everybody who can reach the address may ask."""

    keys: tuple[KeyConfig, ...] = ()
    keys_file: Path | None = None  # a YAML list of more keys; `keys` has them all once loaded
    usage_file: Path | None = None  # where quotas are remembered across restarts
    cors_origins: tuple[str, ...] = ()


class Admin(Section):
    """/status, /metrics and /admin on an address of their own, or /admin by a key of its own."""

    host: str = "127.0.0.1"
    port: Port | None = None
    sha256: Digest | None = None  # of the key for `Authorization: Bearer`
