"""Warns about backends that serve without a proof: at the start, and repeatedly afterwards."""

import asyncio
import logging
from collections.abc import Iterable, Mapping

from octet.proof.verdict import WEAK
from serve.config import PoolConfig
from serve.gateway.state import Gateway
from serve.proof.exam import directory_of
from serve.routing import Pool

__all__ = ["keep_warning", "proving", "unproven"]

_log = logging.getLogger(__name__)

EVERY_S = 600.0


def unproven(pools: Mapping[str, PoolConfig]) -> list[str]:
    """Returns a line for each pool with backends that will serve unproven, and why."""
    found = []
    for name, pool in pools.items():
        entries = [*pool.backends, *([None] if pool.discover else [])]
        without = [entry for entry in entries if directory_of(pool.proof, entry) is None]
        if not pool.proof.enabled:
            why = "proof is off (--no-proof, or proof.enabled: false)"
        elif without:
            why = (
                "it has no golden records: set proof.golden to the export, or the calibration, that"
                " its backends serve"
            )
        else:
            continue
        found.append(f"pool {name}: SERVES UNPROVEN, its log-probabilities are not checked: {why}")
    return found


def proving(pools: Iterable[Pool]) -> list[str]:
    """Returns lines on the backends that are being proven: which of a pool, and against what."""
    found = []
    for pool in pools:
        by_label: dict[str, list[str]] = {}
        for member in pool.members:
            if member.standing == "unproven" and member.proof is not None:
                by_label.setdefault(member.proof.label, []).append(member.name)
        found += [
            f"pool {pool.name}: proving {', '.join(names)} by {label}; each serves once its answers"
            " match"
            for label, names in by_label.items()
        ]
    return found


_WITHOUT: Mapping[str, str] = {
    "admitted": "SERVES UNPROVEN: it returns no log-probabilities",
    "weakly_proven": f"serves {WEAK}",
}


def _weak(gateway: Gateway) -> list[str]:
    """Returns a line for each backend that serves with a weak proof, or with none."""
    return [
        f"pool {pool.name}: {member.name} {_WITHOUT[member.proof.state]}"
        for pool in gateway.pools.values()
        for member in pool.members
        if member.proof is not None and member.proof.state in _WITHOUT
    ]


async def keep_warning(gateway: Gateway) -> None:
    """Logs the warnings every `EVERY_S` seconds, for as long as the gateway runs."""
    while True:
        await asyncio.sleep(EVERY_S)
        used = {name: pool.config for name, pool in gateway.pools.items()}
        for line in [*unproven(used), *_weak(gateway)]:
            _log.warning("%s", line)
