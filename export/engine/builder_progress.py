"""Shows the progress of TensorRT's builder, and stops it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from octet.progress import progress_bars

__all__ = ["progress_monitor"]


@contextmanager
def progress_monitor(trt: Any, console: Console | None, stop: threading.Event) -> Iterator[Any]:
    """Yields an `IProgressMonitor` that draws on `console`, or draws nothing if that is None.

    Once `stop` is set, the builder ends at its next step.
    """
    with progress_bars(console, "steps", transient=True) as bars:

        class Monitor(trt.IProgressMonitor):  # type: ignore[misc]  # tensorrt is untyped
            def __init__(self) -> None:
                trt.IProgressMonitor.__init__(self)
                self.steps: dict[str, int] = {}  # of each phase under way

            def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
                self.steps[phase] = steps
                bars.update(phase, 0, steps)

            def step_complete(self, phase: str, step: int) -> bool:
                bars.update(phase, step + 1, self.steps[phase])
                return not stop.is_set()

            def phase_finish(self, phase: str) -> None:
                bars.remove(phase)

        yield Monitor()
