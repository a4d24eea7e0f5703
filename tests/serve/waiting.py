"""Waiting for what other tasks do."""

import asyncio
from collections.abc import Callable

__all__ = ["until"]


async def until(condition: Callable[[], object]) -> None:
    """Returns once `condition()` holds; fails if that takes a minute."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)
