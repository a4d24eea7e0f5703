"""Shows the progress of TensorRT's builder, and stops it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

__all__ = ["progress_monitor"]


@contextmanager
def progress_monitor(trt: Any, console: Console | None, stop: threading.Event) -> Iterator[Any]:
    """Yields an `IProgressMonitor` that draws on `console`, or draws nothing if that is None.

    Once `stop` is set, the builder ends at its next step.
    """
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=console is None) as bars:

        class Monitor(trt.IProgressMonitor):  # type: ignore[misc]  # tensorrt is untyped
            def __init__(self) -> None:
                trt.IProgressMonitor.__init__(self)
                self.tasks: dict[str, TaskID] = {}

            def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
                self.tasks[phase] = bars.add_task(phase, total=steps)

            def step_complete(self, phase: str, step: int) -> bool:
                bars.update(self.tasks[phase], completed=step + 1)
                return not stop.is_set()

            def phase_finish(self, phase: str) -> None:
                bars.remove_task(self.tasks.pop(phase))

        yield Monitor()
