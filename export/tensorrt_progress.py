"""A progress bar for TensorRT's builder, and the way to interrupt it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

__all__ = ["progress_monitor"]


@contextmanager
def progress_monitor(
    trt: Any, console: Console | None, interrupted: threading.Event
) -> Iterator[Any]:
    """An `IProgressMonitor` that draws on `console`, or nothing if that is None.

    Ctrl-C reaches Python inside one of the builder's calls, through which no exception may pass:
    then `interrupted` is set, and the builder is asked to stop at its next step.
    """
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=console is None) as bars:

        class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
            def __init__(self) -> None:
                trt.IProgressMonitor.__init__(self)
                self.tasks: dict[str, TaskID] = {}

            def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
                with _noting(interrupted):
                    self.tasks[phase] = bars.add_task(phase, total=steps)

            def step_complete(self, phase: str, step: int) -> bool:
                with _noting(interrupted):
                    if phase in self.tasks:
                        bars.update(self.tasks[phase], completed=step + 1)
                return not interrupted.is_set()

            def phase_finish(self, phase: str) -> None:
                with _noting(interrupted):
                    if phase in self.tasks:
                        bars.remove_task(self.tasks.pop(phase))

        yield Monitor()


@contextmanager
def _noting(interrupted: threading.Event) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        interrupted.set()
