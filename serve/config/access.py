"""Access: the clients' API keys with their models, rates and quotas; and administration."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from serve.config.section import Count, Digest, Integer, Name, Number, Port, Section

__all__ = ["Access", "Admin", "KeyConfig"]


def _in_utc(moment: datetime) -> datetime:
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


class KeyConfig(Section):
    """One API key. The file has only its SHA-256; `octet keys new` prints key and SHA-256."""

    name: Name  # in metrics and logs
    sha256: Digest
    models: tuple[Name, ...] | None = None  # public names, or aliases; null: all
    priority: Annotated[Integer, Field(ge=-100, le=100)] = 0  # higher goes first
    weight: Annotated[Number, Field(gt=0)] = 1.0  # share of the tokens within its priority
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    tokens_per_day: Count | None = None  # quota; the day is UTC's
    max_in_flight: Count | None = None  # requests
    expires: Annotated[datetime, AfterValidator(_in_utc)] | None = None  # without a zone: UTC


class Access(Section):
    """Access of clients. Without keys, anybody who can reach the address may send requests."""

    keys: tuple[KeyConfig, ...] = ()
    keys_file: Path | None = None  # a YAML list of more keys; `keys` has them all once loaded
    usage_file: Path | None = None  # keeps used quotas across restarts
    cors_origins: tuple[str, ...] = ()


class Admin(Section):
    """Puts /status, /metrics and /admin on a separate address, or gives /admin a separate key."""

    host: str = "127.0.0.1"
    port: Port | None = None
    sha256: Digest | None = None  # of the key for `Authorization: Bearer`
