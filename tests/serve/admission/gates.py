"""A pool's gate on a clock that jumps, and requests that come to it."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from serve.admission.token_gate import Gate

__all__ = ["asked", "assert_empty", "busy", "enter", "full", "make_gate"]


def make_gate(limit: int | None) -> Gate:
    gate = Gate("pool", clock=asyncio.get_running_loop().time, chance=lambda: 0.0)
    gate.set_limit(limit)
    return gate


async def enter(
    gate: Gate,
    tokens: int,
    key: str = "key",
    *,
    priority: int = 0,
    weight: float = 1.0,
    max_queue: int = 100,
    max_wait_s: float = 60.0,
    deadline: float | None = None,
    starting: Callable[[], bool] = lambda: False,
) -> str:
    """As `Admission` does; returns the key, for lists of who came in."""
    flow = gate.queue.flow(key, priority, weight)
    if not gate.try_enter(flow, tokens):
        await gate.wait(
            flow,
            tokens,
            max_queue=max_queue,
            max_wait_s=max_wait_s,
            deadline=deadline,
            starting=starting,
        )
    return key


async def asked(*requests: Coroutine[Any, Any, str]) -> list[asyncio.Task[str]]:
    """Tasks that have reached the gate, in this order."""
    tasks = []
    for request in requests:
        tasks.append(asyncio.create_task(request))
        await asyncio.sleep(0)
    return tasks


def assert_empty(gate: Gate) -> None:
    assert (gate.tokens, gate.requests, len(gate.queue), gate.queue.tokens) == (0, 0, 0, 0)


async def full(limit: int) -> Gate:
    """One request has all of it."""
    gate = make_gate(limit)
    await enter(gate, limit)
    return gate


async def busy(limit: int, stay_s: float) -> Gate:
    """A full pool of one request, in which tokens have stayed for so long until now."""
    gate = make_gate(limit)
    for _ in range(10):
        gate.drain.left(limit, stay_s, limit, 0.0)
    await enter(gate, limit)
    return gate
