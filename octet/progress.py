"""Shows a progress bar over tokens, with their rate and the time left."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

__all__ = ["Spread", "progress_bar"]


class _RateColumn(TextColumn):
    def __init__(self) -> None:
        super().__init__("")

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f} tokens/s")


@contextmanager
def progress_bar(
    console: Console | None, description: str, tokens: int
) -> Iterator[Callable[[int], None]]:
    """Yields a function that advances the bar by a number of tokens; no bar without a console."""
    if console is None:
        yield lambda done: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,}/{task.total:,} tokens"),
        _RateColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(description, total=tokens)
        yield lambda done: progress.advance(task, done)


class Spread:
    """Advances a progress bar by `total` tokens, spread evenly over `steps` of work."""

    def __init__(self, advance: Callable[[int], None], total: int, steps: int) -> None:
        self._advance, self._total, self._steps = advance, total, steps
        self._done = self._told = 0

    def step(self, steps: int = 1) -> None:
        self._done += steps
        reached = self._total * self._done // max(self._steps, 1)
        self._advance(reached - self._told)
        self._told = reached

    def finish(self) -> None:
        """Advances by the remaining tokens, if less work was needed."""
        self.step(self._steps - self._done)
