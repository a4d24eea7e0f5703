"""Holds what `octet doctor` found: a table of recipes and caches, and findings with remedies."""

from collections.abc import Iterator
from typing import Literal

from pydantic import BaseModel, ConfigDict

from octet.hardware.support import Outcome

__all__ = ["Diagnosis", "Finding", "Level", "Row", "Target"]

Level = Literal["error", "warning", "note"]


class _Facts(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Finding(_Facts):
    """A sentence about the machine, and what to do about it; an error makes the exit code 1."""

    level: Level
    text: str
    remedy: str = ""


class Row(_Facts):
    """An engine's outcome for a recipe's weights, or for a cache, on one kind of device."""

    device: str
    engine: str  # and its version
    kind: Literal["weights", "cache"]
    name: str  # of the recipe or the cache
    outcome: Outcome
    how: str = ""  # for example "FLASHINFER", or "truncates"
    message: str = ""
    remedy: str = ""
    measured: bool = False


class Target(_Facts):
    """The verdict on an artifact: how it runs here, or why it does not."""

    path: str
    device: str
    engine: str
    weights: Outcome
    cache: Outcome
    sentence: str
    command: str = ""  # that serves it
    message: str = ""
    remedy: str = ""

    @property
    def runs(self) -> bool:
        return not {self.weights, self.cache} & {"refused", "corrupt", "unknown"}


class Diagnosis(_Facts):
    """The whole report; `exit_code` is 1 if anything does not work as wanted."""

    rows: tuple[Row, ...] = ()
    findings: tuple[Finding, ...] = ()
    targets: tuple[Target, ...] = ()

    def of(self, level: Level) -> Iterator[Finding]:
        """Yields the findings of a level."""
        return (finding for finding in self.findings if finding.level == level)

    @property
    def exit_code(self) -> int:
        return int(any(self.of("error")))
