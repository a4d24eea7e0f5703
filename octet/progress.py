"""Shows progress bars, with their rate and the time left; none without a console."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

__all__ = ["Bars", "Spread", "progress_bar", "progress_bars"]

# Rich forgets steps after 30 s, and without two steps has no rate: a layer may take minutes.
_RATE_PERIOD_S = 1e9
_NARROW = 80  # columns; below, a bar's line has no room for its rate
_WIDE = 100  # columns; from here on, it has room for the time elapsed


class _Done(ProgressColumn):
    """Work done, work in all, and the rate, in `unit`s or, with "bytes", in kB, MB and so on."""

    def __init__(self, unit: str) -> None:
        super().__init__(Column(no_wrap=True))
        self._unit = unit

    def render(self, task: Task) -> Text:
        done, total = int(task.completed), int(task.total or 0)
        speed = task.finished_speed or task.speed
        if self._unit == "bytes":
            rate = "" if speed is None else f" {decimal(int(speed))}/s"
            return Text(f"{decimal(done)}/{decimal(total)}{rate}")
        rate = "" if speed is None else f" {_figure(speed)} {self._unit}/s"
        return Text(f"{done:,}/{total:,} {self._unit}{rate}")


def _figure(speed: float) -> str:
    """Formats a rate with at least two digits: a step may take minutes."""
    return f"{speed:,.0f}" if speed >= 10 else f"{speed:.2g}"


class Bars:
    """Any number of bars on one console, each by its name."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def update(self, name: str, done: int, total: int) -> None:
        """Sets a bar to `done` of `total`; adds it if it is new."""
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=total)
        self._progress.update(self._tasks[name], completed=done)

    def advance(self, name: str, more: int) -> None:
        """Moves a bar that `update` added on."""
        self._progress.advance(self._tasks[name], more)

    def remove(self, name: str) -> None:
        self._progress.remove_task(self._tasks.pop(name))


@contextmanager
def progress_bars(
    console: Console | None, unit: str = "tokens", *, transient: bool = False
) -> Iterator[Bars]:
    """Yields bars that count `unit`s; `transient` ones disappear at the end.

    A bar's rate counts from its first update on, which may be of work kept from an earlier run.
    Each bar is one line: it shrinks first, and a narrow terminal shows a percentage in its place. A
    wide one also shows the time elapsed.
    """
    whole = Column(no_wrap=True)
    narrow = console is not None and console.width < _NARROW
    shown: tuple[ProgressColumn, ...] = (
        (TaskProgressColumn(table_column=whole),)
        if narrow
        else (BarColumn(bar_width=None, table_column=Column(max_width=40)), _Done(unit))
    )
    wide = console is not None and console.width >= _WIDE
    elapsed = (TextColumn("elapsed", table_column=whole), TimeElapsedColumn(table_column=whole))
    with Progress(
        TextColumn("{task.description}", markup=False, table_column=whole),
        *shown,
        *(elapsed if wide else ()),
        TextColumn("ETA", table_column=whole),
        TimeRemainingColumn(table_column=whole),
        console=console,
        transient=transient,
        disable=console is None,
        speed_estimate_period=_RATE_PERIOD_S,
    ) as progress:
        yield Bars(progress)


@contextmanager
def progress_bar(
    console: Console | None,
    description: str,
    total: int,
    unit: str = "tokens",
    *,
    transient: bool = False,
) -> Iterator[Callable[[int], None]]:
    """Yields a function that advances one bar by a number of `unit`s.

    An error that ends the work has `description` as a note.
    """
    with progress_bars(console, unit, transient=transient) as bars:
        bars.update(description, 0, total)
        try:
            yield lambda more: bars.advance(description, more)
        except Exception as error:
            error.add_note(description)
            raise


class Spread:
    """Advances a progress bar by `total` tokens, spread evenly over `steps` of work."""

    def __init__(self, advance: Callable[[int], None], total: int, steps: int) -> None:
        self._advance, self._total, self._steps = advance, total, steps
        self._done = self._reached = 0

    def step(self, steps: int = 1) -> None:
        self._done = min(self._done + steps, self._steps)  # work may have to be repeated
        reached = self._total * self._done // max(self._steps, 1)
        self._advance(reached - self._reached)
        self._reached = reached

    def finish(self) -> None:
        """Advances by the remaining tokens, if less work was needed."""
        self.step(self._steps - self._done)
