"""Finds backends while the gateway runs: at the addresses of a DNS name, or in a changing file.

`refuse_unfit` decides whether a backend may join a running pool.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

from octet.errors import ConfigError, OctetError
from serve.config import BackendConfig, DnsDiscovery, FileDiscovery
from serve.config.checks import at_address, needs_model
from serve.config.load import load_backends
from serve.routing import Member, Pool

__all__ = ["Discovery", "origin_of", "refuse_unfit"]

_log = logging.getLogger(__name__)


def refuse_unfit(config: BackendConfig, members: Iterable[Member], models: Sequence[str]) -> None:
    """Raises ConfigError for a name that a member already has, or a missing `model`."""
    if config.name is not None and any(member.name == config.name for member in members):
        raise ConfigError(f"the pool has a backend named '{config.name}' already")
    if problem := needs_model(config, models):
        raise ConfigError(problem)


FIRST_ROUND_S = 5.0  # longest wait of a start for a source's first answer


def origin_of(source: DnsDiscovery | FileDiscovery) -> str:
    """Names the source of a member, as in `Member.origin`."""
    if isinstance(source, DnsDiscovery):
        return f"dns {source.dns}:{source.port}"
    return f"file {source.file}"


class Discovery:
    """Keeps the members of one pool that come from one source equal to what the source lists.

    A source that cannot be read changes nothing: the members stay, and `problem` says why.
    """

    def __init__(
        self,
        source: DnsDiscovery | FileDiscovery,
        pool: Pool,
        models: Sequence[str],
        changing: asyncio.Lock,
    ) -> None:
        """`changing` is held while members come and go."""
        self.pool = pool
        self.origin = origin_of(source)
        self.problem = ""
        self._source = source
        self._models = models
        self._changing = changing
        self._seen: tuple[int, ...] | None = None  # state of the file when it was last read
        self._first = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stopped = False
        self._dropped: list[BackendConfig] = []  # removed by an administrator, and still there

    async def start(self) -> None:
        """Starts discovery; returns after the first round, or after `FIRST_ROUND_S`.

        Does nothing if it was already stopped, because another reload was quicker.
        """
        if self._task is not None or self._stopped:
            return
        self._task = asyncio.create_task(self._run(), name=f"discovery {self.origin}")
        try:
            async with asyncio.timeout(FIRST_ROUND_S):  # wait_for of 3.11 may lose a cancellation
                await self._first.wait()
        except TimeoutError:
            _log.warning("pool %s: %s has not answered yet", self.pool.name, self.origin)

    def drop(self, config: BackendConfig) -> None:
        """Finds this backend no more, until the source has lost it or the file is reloaded."""
        self._dropped.append(config)

    def stop(self) -> None:
        """Stops discovery; the members stay."""
        self._stopped = True
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        self.stop()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                await self._round()
                self._say("")
            except OctetError as error:
                self._say(str(error))
            except Exception as error:  # a defect of Octet is no reason to stop
                _log.exception("pool %s: %s", self.pool.name, self.origin)
                self.problem = repr(error)
            self._first.set()
            await asyncio.sleep(self._source.every_s)

    def _say(self, problem: str) -> None:
        """Logs each problem once, and its end."""
        if problem and problem != self.problem:
            _log.warning("pool %s: %s; keeping its backends", self.pool.name, problem)
        elif self.problem and not problem:
            _log.info("pool %s: %s works again", self.pool.name, self.origin)
        self.problem = problem

    async def _round(self) -> None:
        """Queries the source and applies its answer. Raises OctetError."""
        if isinstance(self._source, DnsDiscovery):
            await self._become(await _at_addresses(self._source))
            return
        path = self._source.file
        seen = await asyncio.to_thread(_state, path)
        if seen != self._seen or self.problem:
            await self._become(await asyncio.to_thread(load_backends, path))
            self._seen = seen

    async def _become(self, wanted: Sequence[BackendConfig]) -> None:
        """Adds new members; removes those that are not in `wanted` when their last request ends."""
        async with self._changing:
            self._dropped = [config for config in self._dropped if config in wanted]
            wanted = [config for config in wanted if config not in self._dropped]
            own = [member for member in self.pool.members if member.origin == self.origin]
            gone = [member for member in own if member.config not in wanted]
            present = [member.config for member in own]
            staying = [member for member in self.pool.members if member not in gone]
            missing = [config for config in wanted if config not in present]
            missing.sort(key=lambda config: config.name is None)  # named ones keep their names
            outcomes = await self._prepared(missing, staying)
            come = [outcome for outcome in outcomes if isinstance(outcome, Member)]
            problem = next((o for o in outcomes if isinstance(o, OctetError)), None)
            if come or gone:
                self.pool.swap(self.pool.config, staying + come)
                _log.info(
                    "pool %s: %s: %d added, %d removed, %d kept",
                    *(self.pool.name, self.origin, len(come), len(gone), len(own) - len(gone)),
                )
        if problem is not None:
            raise problem

    async def _prepared(
        self, wanted: Sequence[BackendConfig], staying: Sequence[Member]
    ) -> list[Member | OctetError]:
        """Returns a member, or an error, for each of `wanted`; an error does not affect the others.

        Prepares all at once, as each may take as long as its health check. Leaves nothing behind if
        cancelled.
        """
        come: list[Member] = []

        async def prepare(config: BackendConfig) -> Member | OctetError:
            try:
                refuse_unfit(config, staying, self._models)
                member = await self.pool.prepare(config, self.origin)
            except OctetError as error:
                return error
            come.append(member)
            return member

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(prepare(config)) for config in wanted]
        except BaseException:
            await asyncio.gather(*map(self.pool.discard, come), return_exceptions=True)
            raise
        return [task.result() for task in tasks]


async def _at_addresses(source: DnsDiscovery) -> list[BackendConfig]:
    """Returns a backend for each address of the name, in a fixed order."""
    try:
        hosts = await addresses_of(source.dns, source.port)
    except OSError as error:
        raise ConfigError(f"dns {source.dns}: {error.strerror or error}") from None
    return [at_address(source, host) for host in sorted(hosts)]


async def addresses_of(name: str, port: int) -> set[str]:
    """Resolves all addresses, IPv4 and IPv6. Raises OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return {str(address[4][0]) for address in found}


def _state(path: Path) -> tuple[int, ...]:
    """Returns a value that changes whenever the file is written or replaced."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    return (found.st_ino, found.st_mtime_ns, found.st_size)
