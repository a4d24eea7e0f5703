"""A progress bar over tokens, with their rate and the time left; or nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

__all__ = ["progress_bar"]


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
    """Yields a function to tell how many tokens were done since last; silent without a console."""
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
