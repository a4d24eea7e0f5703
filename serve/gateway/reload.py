"""Reloads while requests run: prepares the new configuration, then switches in one step."""

import asyncio
import logging
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from octet.errors import ConfigError, OctetError
from serve.access.keys import Keys
from serve.config import EmbeddedConfig, GatewayConfig, ManagedConfig, PoolConfig, checks
from serve.config.checks import load_config
from serve.config.problems import one_line
from serve.gateway.capture import require_writable
from serve.gateway.discovery import origin_of
from serve.gateway.state import Epoch, Gateway, all_of
from serve.gateway.unproven import unproven
from serve.proof.exam import Exams
from serve.routing import Member, Pool, Routes
from serve.routing.members import Provers

__all__ = ["Change", "reload", "reload_from"]

_log = logging.getLogger(__name__)

# Settings that are read only at the start; a dot separates a section from its field.
AT_START_ONLY = (
    *("listen", "admin.host", "admin.port", "admin.rollouts_file", "access.cors_origins"),
    *("access.shared", "logs", "traces"),
)


async def reload_from(gateway: Gateway, path: Path | None) -> dict[str, Any]:
    """Switches to the file's current configuration, or raises the OctetError that prevents it."""
    report: dict[str, Any]
    at = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        if path is None:
            raise ConfigError("there is no configuration file to read again")
        async with gateway.reloading:  # a later reload reads the file later, and wins
            config = await asyncio.to_thread(load_config, path)
            config = config if gateway.proves else config.without_proof()
            report = await reload(gateway, config)
    except Exception as error:
        defect = None if isinstance(error, OctetError) else error
        _log.error("not reloaded, nothing has changed: %s", error, exc_info=defect)
        gateway.metrics.reloads.labels("failed").inc()
        gateway.last_reload = {"at": at, "outcome": "failed", "reason": str(error) or repr(error)}
        raise
    used = {name: pool.config for name, pool in gateway.pools.items()}
    for warning in [*checks.warnings(config), *unproven(used)]:
        _log.warning("%s", warning)
    _log.info("reloaded %s: %s", path, ", ".join(f"{k} {v}" for k, v in report.items()))
    gateway.metrics.reloads.labels("ok").inc()
    gateway.last_reload = {"at": at, "outcome": "ok", "reason": None}
    return report


async def reload(gateway: Gateway, config: GatewayConfig) -> dict[str, Any]:
    """Switches to `config` atomically; returns what changed.

    Backends whose configuration is the same stay, with their state; the others get no new requests
    and are closed when their last one ends. Raises OctetError, and changes nothing, if a backend
    can never work as configured.
    """
    async with gateway.changing:
        gateway.require_accepting()
        change = await Change.prepared(gateway, config)
        report = change.commit()
    await all_of(discovery.start() for discovery in gateway.discoveries)
    return report


class Change:
    """A prepared reload: the changes to each pool, ready to be committed."""

    def __init__(self, gateway: Gateway, config: GatewayConfig) -> None:
        self._gateway = gateway
        self.config, self.restart = _for_this_process(gateway.config, config)
        self._new_pools: dict[str, Pool] = {}
        self._changes: dict[str, _PoolChange] = {}  # of pools that stay

    @classmethod
    async def prepared(cls, gateway: Gateway, config: GatewayConfig) -> Self:
        """Starts the new pools and backends. Closes them again before it raises OctetError."""
        change = cls(gateway, config)
        try:
            await change._prepare()
        except BaseException:
            await change._discard()
            raise
        return change

    async def _prepare(self) -> None:
        gateway, config = self._gateway, self.config
        if gateway.config.one_at_a_time != config.one_at_a_time:
            raise ConfigError(
                "a model with one_at_a_time is added, changed or removed only by a restart"
            )
        if gateway.processes > 1:
            found = list(checks.problems_of_workers(config, gateway.processes))
            if found:
                raise ConfigError(one_line(found, {}))
        require_writable(config)
        for name, pool_config in config.all_pools.items():
            models = config.models_of(name)
            pool = gateway.pools.get(name)
            if not models:
                continue
            if pool is None:
                self._new_pools[name] = Pool.from_config(name, pool_config, models[0])
            else:
                self._changes[name] = _PoolChange(
                    pool, pool_config, models[0], walked=name in config.one_at_a_time
                )
        self.keys = Keys.from_config(config.access, gateway.keys)
        await all_of(
            [pool.start() for pool in self._new_pools.values()]
            + [change.prepare() for change in self._changes.values()]
        )
        kept = {name: change.pool for name, change in self._changes.items()}
        used = kept | self._new_pools
        self.pools = {name: used[name] for name in config.all_pools if name in used}
        self.routes = Routes.from_config(config, self.pools, gateway.rollouts.shares)

    async def _discard(self) -> None:
        await asyncio.gather(
            *(pool.close() for pool in self._new_pools.values()),
            *(c.pool.discard(member) for c in self._changes.values() for member in c.come),
            return_exceptions=True,
        )

    def commit(self) -> dict[str, Any]:
        """Applies all changes without yielding to other tasks; returns what has changed."""
        report: dict[str, Any] = {
            "pools_added": [name for name in self._new_pools],
            "pools_removed": [name for name in self._gateway.pools if name not in self.pools],
            "backends_added": sum(len(pool.members) for pool in self._new_pools.values()),
            "backends_removed": 0,
            "backends_kept": 0,
        }
        for change in self._changes.values():
            removed = change.commit()
            report["backends_added"] += len(change.come)
            report["backends_removed"] += removed
            report["backends_kept"] += len(change.pool.members) - len(change.come)
        for name, pool in self._gateway.pools.items():
            if self.pools.get(name) is not pool:
                report["backends_removed"] += len(pool.members)
        self._gateway.replace(Epoch(self.config, self.routes, self.keys), self.pools)
        self.keys.in_use()
        report["needs_restart"] = self.restart
        return report


class _PoolChange:
    """One pool that stays: the members that its new configuration lists, old and new."""

    def __init__(self, pool: Pool, config: PoolConfig, model: str, *, walked: bool) -> None:
        """`model` is the public model name of new backends from now on.

        `walked`: the pool is started one at a time with others.
        """
        self.pool = pool
        self.config = config
        self.model = model
        self._walked = walked
        self.come: list[Member] = []
        self._listed: list[Member] = []
        self._exams = Exams(config.proof)
        self._provers: Provers = {}

    async def prepare(self) -> None:
        """Keeps each member whose entry is unchanged; starts new members for the other entries.

        A pool that is started one at a time with others keeps the members that it has.
        """
        if self._walked:
            self._listed = list(self.pool.members)
            return
        members = filter(self._serves_the_same, self.pool.members)
        free = [member for member in members if member.origin in ("config", "admin")]
        found: list[Member | None] = []
        for entry in self.config.backends:
            member = next((m for m in free if m.config == entry), None)
            if member is not None:
                free.remove(member)
            found.append(member)
        missing = [i for i, member in enumerate(found) if member is None]
        missing.sort(key=lambda i: self.config.backends[i].name is None)  # named ones first
        starts = (self._start(self.config.backends[i]) for i in missing)
        outcomes = await asyncio.gather(*starts, return_exceptions=True)
        for i, outcome in zip(missing, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                raise outcome
            found[i] = outcome
        self._listed = [member for member in found if member is not None]
        stays = [member for member in self.pool.members if member not in self.come]
        self._provers = await self.pool.examined(stays, self._exams)

    def _serves_the_same(self, member: Member) -> bool:
        """Returns whether its backend serves the same model, even if the public name changed."""
        config = member.config
        own = (
            config is None
            or isinstance(config, EmbeddedConfig | ManagedConfig)
            or config.model is not None
        )
        return own or self.model == self.pool.model

    async def _start(self, entry: Any) -> Member:
        # It may replace another member, so its first verdict is awaited.
        member = await self.pool.prepare(
            entry, model=self.model, exams=self._exams, patience_s=math.inf
        )
        self.come.append(member)
        return member

    def commit(self) -> int:
        """Applies the change; returns the number of members that left."""
        before = self.pool.members
        origins = {origin_of(source) for source in self.config.discover}
        names = {member.name for member in self._listed}
        discovered = [
            member
            for member in filter(self._serves_the_same, before)
            if member.origin in origins and member.name not in names
        ]
        self.pool.model = self.model
        members = [*self._listed, *discovered]
        self.pool.swap(self.config, members, exams=self._exams, provers=self._provers)
        return sum(member not in self.pool.members for member in before)


def _for_this_process(old: GatewayConfig, new: GatewayConfig) -> tuple[GatewayConfig, list[str]]:
    """Returns `new` with the `AT_START_ONLY` settings of `old`, and the keys where they differ."""
    differing = []
    for key in AT_START_ONLY:
        section, _, field = key.partition(".")
        before, after = getattr(old, section), getattr(new, section)
        if not field and before != after:
            differing.append(key)
            new = new.model_copy(update={section: before})
        elif field and getattr(before, field) != getattr(after, field):
            differing.append(key)
            kept = after.model_copy(update={field: getattr(before, field)})
            new = new.model_copy(update={section: kept})
    return new, differing
