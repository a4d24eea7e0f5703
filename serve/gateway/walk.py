"""Starts the pools of a model one at a time: the next one when the one before cannot serve.

A pool is given up if none of its backends can serve: vLLM does not start, the proof refuses it, or
it has not been ready for half an hour. It is stopped before the next one starts, which may need
its memory, and stays stopped until the gateway is restarted.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from itertools import zip_longest

from octet.errors import OctetError
from serve.backends.base import supervised
from serve.members.member import Member
from serve.routing import Pool
from serve.routing.pool import GivenUp

__all__ = ["walk"]

_log = logging.getLogger(__name__)
_POLL_S = 0.5
_OUT_S = 1800.0  # time without a ready backend; longer than vLLM takes to start and be proven


async def walk(model: str, pools: Sequence[Pool], changing: asyncio.Lock) -> None:
    """Starts `pools` in this order, each when the one before was given up.

    Ends only if the last one cannot be started. `changing` is held while members come and go.
    """
    given_up: list[str] = []
    for pool, following in zip_longest(pools, pools[1:]):
        pool.instead_of = ", ".join(given_up)
        pool.has_successor = following is not None
        pool.phase = "starting"
        why = await _started(pool, changing) or await _failure(pool, last=following is None)
        if following is None:
            _log.error("model %s: pool %s, the last, %s", model, pool.name, why.reason)
        else:
            line = "model %s: pool %s is given up, and %s started instead: it %s"
            _log.warning(line, model, pool.name, following.name, why.reason)
            following.phase = "starting"  # requests wait for it from now on
        async with changing:
            pool.give_up(why)
        while pool.retiring:
            await asyncio.sleep(_POLL_S)
        given_up.append(f"{pool.name} {why.code}")


async def _started(pool: Pool, changing: asyncio.Lock) -> GivenUp | None:
    """Starts the backends of `pool`; returns why that cannot be done."""
    members: list[Member] = []
    async with changing:
        try:
            for entry in pool.config.backends:
                members.append(await pool.prepare(entry, patience_s=0.0))
        except Exception as error:
            if not isinstance(error, OctetError):  # a defect of Octet; the next pool may start
                _log.exception("pool %s", pool.name)
            for member in members:
                await pool.discard(member)
            return GivenUp("does_not_start", f"cannot be started: {error}")
        pool.swap(pool.config, members)
        pool.phase = "started"
    return None


async def _failure(pool: Pool, *, last: bool) -> GivenUp:
    """Returns when none of the backends can serve. The last pool is never given up."""
    ready_at = time.monotonic()
    while True:
        await asyncio.sleep(_POLL_S)
        if last:
            continue
        if pool.ready:
            ready_at = time.monotonic()
        failures = [_why(member) for member in pool.members]
        found = [failure for failure in failures if failure is not None]
        if found and len(found) == len(failures):
            return GivenUp(found[0].code, "; ".join(failure.reason for failure in found))
        if time.monotonic() - ready_at > _OUT_S:
            return GivenUp("not_ready", f"has not been ready for {_OUT_S:g} s")


def _why(member: Member) -> GivenUp | None:
    """Returns why a backend cannot serve; None if it does, or may yet."""
    if supervised(member.backend) and (end := member.backend.gave_up):
        return GivenUp("does_not_start", f"does not start: vLLM {end}")
    if member.standing == "refused" and member.proof is not None:
        return GivenUp("refused", f"is refused by its proof: {member.proof.reason}")
    return None
