"""Keeps one vLLM running: starts it, logs its output, and starts it again when it ends.

The delay before a start doubles with each process that did not last. A process is ended if it is
not healthy in time, or no longer healthy: vLLM's server may outlive the engine that was killed.
"""

import asyncio
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress

from octet.errors import OctetError, printable
from serve.vllm.process import STOP_S, cause_in, free_port, guarded

__all__ = ["Supervisor"]

_log = logging.getLogger(__name__)
_POLL_S = 1.0
_LASTED_S = 60.0  # after a process that was healthy for so long, the next one starts at once
_DELAYS_S = (0.5, 60.0)  # the first delay, and the longest
# A process that was healthy once is ended if it reports for so long that its engine is dead, or
# does not answer: one that is busy may take its time.
_DEAD_S, _SILENT_S = 5.0, 120.0
_TRIES = 3  # processes in a row that do not last
_KEPT = 400  # lines of the log, to find the cause of an end


class Supervisor:
    """Runs a command until `close`. Its server is healthy when `health` returns the status 200."""

    def __init__(
        self,
        name: str,
        words: Callable[[], Awaitable[Sequence[str]]],
        health: Callable[[], Awaitable[int]],
        *,
        environment: Mapping[str, str],
        moved: Callable[[int], None],
        start_timeout_s: float,
    ) -> None:
        """`words` makes the command but for its port; `moved` is called with each new port.

        `words` is called again after each process that was never healthy: what the command was made
        from, such as the free memory of a GPU, may have changed.
        """
        self.name = name  # of the backend, before each line of the log
        self._make_words = words
        self._words: Sequence[str] = ()
        self._health = health
        self._environment = dict(environment)
        self._moved = moved
        self._start_timeout_s = start_timeout_s
        self._lines: deque[str] = deque(maxlen=_KEPT)
        self._task: asyncio.Task[None] | None = None
        self.was_healthy = False  # some process was
        self.pid: int | None = None
        self.starts = 0
        self.failures = 0  # processes in a row that did not last
        self.last_end = ""  # why the last process ended

    @property
    def gave_up(self) -> str:
        """Returns why another start is unlikely to help; "" while it may.

        One failure suffices before any process was healthy: the next one would most likely end for
        the same reason, minutes later. Further starts are tried even so.
        """
        return self.last_end if self.failures >= (_TRIES if self.was_healthy else 1) else ""

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Ends the process and all that it started."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        while True:
            healthy_s = 0.0
            try:
                healthy_s = await self._live()
            except OSError as error:  # it cannot be executed
                self.last_end = f"cannot be started: {error.strerror or error}"
            except OctetError as error:
                self.last_end = f"cannot be started: {error}"
            except Exception as error:  # a defect of Octet; the next start may succeed
                self.last_end = f"cannot be started: {error!r}"
                _log.exception("%s", self.name)
            if not healthy_s:
                self._words = ()
            self.failures = 0 if healthy_s >= _LASTED_S else self.failures + 1
            delay_s = 0.0
            if self.failures:
                delay_s = min(_DELAYS_S[0] * 2.0 ** (self.failures - 1), _DELAYS_S[1])
            _log.error("%s: vLLM %s; starting it in %g s", self.name, self.last_end, delay_s)
            await asyncio.sleep(delay_s)

    async def _live(self) -> float:
        """Runs one process to its end; returns the seconds for which it was healthy."""
        if not self._words:
            self._words = await self._make_words()
        port = free_port()
        self._moved(port)
        self._lines.clear()
        self.starts += 1
        words = [*self._words, "--host", "127.0.0.1", "--port", str(port)]
        _log.info("%s: starting %s", self.name, " ".join(words))
        with guarded(words) as (guarded_words, pipe):
            process = await asyncio.create_subprocess_exec(
                *guarded_words,
                stdin=pipe,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=os.environ | self._environment,
                start_new_session=True,
            )
            self.pid = process.pid
            assert process.stdout is not None
            reading = asyncio.create_task(self._read(process.stdout))
            ended = asyncio.create_task(process.wait())
            try:
                return await self._until_its_end(ended, reading)
            finally:
                self.pid = None
                await _end(process.pid, ended)
                reading.cancel()

    async def _until_its_end(
        self, ended: "asyncio.Task[int]", reading: "asyncio.Task[None]"
    ) -> float:
        began = time.monotonic()
        healthy_at: float | None = None  # first
        seen_at = began  # healthy, last
        while True:
            await asyncio.wait({ended}, timeout=_POLL_S)
            now = time.monotonic()
            if ended.done():
                await asyncio.wait({reading}, timeout=1.0)  # its last lines
                self.last_end = f"{_describe(ended.result())}: {cause_in(list(self._lines))}"
                break
            status = await self._health()
            if status == 200:
                seen_at = now
                if healthy_at is None:
                    healthy_at, self.was_healthy = now, True
                    _log.info("%s: vLLM is ready after %.0f s", self.name, now - began)
                if now - healthy_at >= _LASTED_S:
                    self.failures = 0
            elif healthy_at is None and now - began > self._start_timeout_s:
                self.last_end = (
                    f"was not ready within {self._start_timeout_s:g} s; its last line:"
                    f" {cause_in(list(self._lines))}"
                )
                break
            elif healthy_at is not None and now - seen_at > (_DEAD_S if status else _SILENT_S):
                self.last_end = (
                    f"has not been healthy for {now - seen_at:.0f} s: {cause_in(list(self._lines))}"
                )
                break
        return 0.0 if healthy_at is None else now - healthy_at

    async def _read(self, output: asyncio.StreamReader) -> None:
        """Logs the output, each line with the backend's name."""
        rest = b""
        while piece := await output.read(64 * 1024):
            *lines, rest = (rest + piece).replace(b"\r", b"\n").split(b"\n")
            if len(rest) > 64 * 1024:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._say(line)
        self._say(rest)

    def _say(self, line: bytes) -> None:
        text = printable(line.decode("utf-8", "replace").rstrip())
        if text:
            self._lines.append(text)
            _log.info("%s | %s", self.name, text)


def _describe(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


async def _end(group: int, ended: "asyncio.Task[int]") -> None:
    """Ends every process of the group, also if this is cancelled meanwhile."""
    try:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGTERM)
        await asyncio.wait({ended}, timeout=STOP_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    await asyncio.wait({ended}, timeout=STOP_S)
