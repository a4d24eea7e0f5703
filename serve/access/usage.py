"""The tokens of each key today (UTC), kept across restarts."""

import json
import logging
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

__all__ = ["Usage"]

WRITE_EVERY_S = 10.0  # a crash loses at most the counts of this time
DAY_S = 86_400

_log = logging.getLogger(__name__)


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    version: Annotated[int, Field(ge=1, le=1)]
    day: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")]
    tokens: dict[str, Annotated[int, Field(ge=0)]]


class Usage:
    """Tokens by key name. `wall` gives seconds since 1970; days begin at midnight UTC."""

    def __init__(
        self,
        path: Path | None = None,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        *,
        before: "Usage | None" = None,
    ) -> None:
        """Reads `path` if it exists. An unusable file is logged and set aside.

        Today's tokens in `before` count too, so that another file does not give a quota twice.
        """
        self.path = path
        self._wall = wall
        self._clock = clock  # goes on when `wall` is set back
        self._day = self._today()
        self._tokens: dict[str, int] = {}
        self._unwritten = False
        self._next_write = clock() + WRITE_EVERY_S
        if path is not None and path.exists():
            self._read(path)
        for key, tokens in before._tokens.items() if before and before._day == self._day else ():
            self._tokens[key] = max(tokens, self._tokens.get(key, 0))
            self._unwritten = True

    def spent(self, key: str) -> int:
        """Returns the tokens of `key` since midnight UTC."""
        self._turn_day()
        return self._tokens.get(key, 0)

    @property
    def day(self) -> int:
        """The day that `spent` is of, in days since 1970."""
        self._turn_day()
        return self._day

    def correct_day(self) -> None:
        """Takes today from `wall`, which was another clock before; the tokens stay."""
        self._day = self._today()

    def add(self, key: str, tokens: int) -> None:
        """Counts `tokens`, and writes the file if the last write is `WRITE_EVERY_S` ago."""
        self._turn_day()
        self._tokens[key] = self._tokens.get(key, 0) + tokens
        self._unwritten = True
        if self.path is not None and self._clock() >= self._next_write:
            self.write()

    def reset_s(self) -> float:
        """Returns the seconds until midnight UTC."""
        return DAY_S - self._wall() % DAY_S

    def write(self) -> None:
        """Writes the file atomically. A failure is only logged: the requests go on."""
        if self.path is None or not self._unwritten:
            return
        self._next_write = self._clock() + WRITE_EVERY_S
        day = datetime.fromtimestamp(self._day * DAY_S, UTC).strftime("%Y-%m-%d")
        document = _Document(version=1, day=day, tokens=self._tokens)
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            beside.write_text(document.model_dump_json(), "utf-8")
            os.replace(beside, self.path)
            self._unwritten = False
        except OSError as error:
            beside.unlink(missing_ok=True)
            _log.warning("usage file %s: not written: %s", self.path, error.strerror)

    def _read(self, path: Path) -> None:
        try:
            document = _Document.model_validate(json.loads(path.read_bytes()))
        except OSError as error:
            _log.warning("usage file %s: %s; quotas begin at zero", path, error.strerror)
        except (ValueError, RecursionError, ValidationError):
            aside = path.with_name(f"{path.name}.unusable")
            try:
                os.replace(path, aside)
            except OSError as error:
                _log.warning("usage file %s: cannot be set aside: %s", path, error.strerror)
            _log.warning(
                "usage file %s: not what Octet writes; now %s, and quotas begin at zero",
                path,
                aside.name,
            )
        else:
            # A later day was written before the clock was set back.
            if document.day >= datetime.fromtimestamp(self._wall(), UTC).strftime("%Y-%m-%d"):
                self._tokens = document.tokens

    def _today(self) -> int:
        return int(self._wall() // DAY_S)

    def _turn_day(self) -> None:
        today = self._today()
        if today > self._day:
            self._tokens = {}
        # A clock that is set back gives no quota twice. By more than a day, it had been wrong
        # before: the tokens stay, and the next midnight by it ends the day.
        if not self._day - 1 <= today <= self._day:
            self._day = today
