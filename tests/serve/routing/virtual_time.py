"""An event loop whose clock jumps to the next timer: hours of health checks in milliseconds."""

import asyncio
import functools
import inspect
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

T = TypeVar("T")
Scene = Callable[..., Coroutine[Any, Any, None]]


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Jump(self._jump))

    def time(self) -> float:
        return self._now

    def _jump(self, seconds: float) -> None:
        self._now += seconds


class _Jump(selectors.DefaultSelector):
    def __init__(self, jump: Callable[[float], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "everybody waits, and no timer will wake anybody"
        ready = super().select(0)
        if not ready:
            self._jump(timeout)
        return ready


def run(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


def as_test(scene: Scene, play: Callable[[Scene], None], given: int = 0) -> Callable[..., None]:
    """A test that plays `scene`: pytest gives the parameters after the first `given`."""

    @functools.wraps(scene)
    def test(*examples: Any, **arguments: Any) -> None:
        play(functools.partial(scene, *examples, **arguments))

    own = inspect.signature(scene)
    cast(Any, test).__signature__ = own.replace(parameters=list(own.parameters.values())[given:])
    return test


def virtual(test: Scene) -> Callable[..., None]:
    """Runs a coroutine test on a `VirtualTimeLoop`."""
    return as_test(test, lambda scene: run(scene()))
