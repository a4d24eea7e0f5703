"""Access: the clients' API keys with their models, rates and quotas; and administration."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from serve.config.section import Count, Digest, Integer, Name, Number, Port, Section

__all__ = ["Access", "Admin", "KeyConfig", "SharedConfig"]


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
    private: bool = False  # its requests are not captured; no shadow and no judge gets a copy

    @property
    def limited(self) -> bool:
        """True if any of its limits is set."""
        limits = (self.requests_per_minute, self.tokens_per_minute, self.tokens_per_day)
        return any(limit is not None for limit in (*limits, self.max_in_flight))


class SharedConfig(Section):
    """Limits shared by several gateways, through Redis; needs `pip install 'octet-llm[shared]'`.

    `access.shared: URL` is short for `access.shared: {url: URL}`.
    """

    url: str  # redis://[USER:PASSWORD@]HOST[:PORT][/DATABASE], rediss:// or unix://
    prefix: Name = "octet"  # of the keys in Redis; gateways with the same one share limits
    # While Redis cannot be used: refuse requests of keys with limits, or give each gateway a share.
    when_lost: Literal["refuse", "share"] = "refuse"
    replicas: Count | None = None  # gateways that share the limits; `share` needs it


def _with_url(value: Any) -> Any:
    return {"url": value} if isinstance(value, str) else value


class Access(Section):
    """Access of clients. Without keys, anyone who can reach the address may send requests."""

    keys: tuple[KeyConfig, ...] = ()
    keys_file: Path | None = None  # a YAML list of more keys; `keys` has them all once loaded
    usage_file: Path | None = None  # keeps used quotas across restarts
    # Redis that holds the keys' limits for several gateways; null: each gateway counts for itself.
    shared: Annotated[SharedConfig | None, BeforeValidator(_with_url)] = None
    cors_origins: tuple[str, ...] = ()


class Admin(Section):
    """Puts /status, /metrics and /admin on a separate address, or gives /admin a separate key."""

    host: str = "127.0.0.1"
    port: Port | None = None
    sha256: Digest | None = None  # of the key for `Authorization: Bearer`
    rollouts_file: Path | None = None  # keeps the outcomes of rollouts; they need it
