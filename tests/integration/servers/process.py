"""Starts a server as a child process in a group of its own, waits for it, and stops it.

It ends with this process, even if that is killed (`serve.vllm.guard`).
"""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from serve.vllm.process import guarded

STOP_SECONDS = 15.0  # from SIGTERM to SIGKILL
LOG_TAIL_LINES = 40


class ServerFailed(RuntimeError):
    """A server that ended or stayed silent, with the end of its log."""


_given: set[int] = set()


def free_port() -> int:
    """Returns a TCP port of 127.0.0.1 that nothing listens on, each one only once.

    A server binds its port up to a minute later. Until then the kernel must not hand it out to a
    process that asks for any free port, so it lies below the range that the kernel uses for these.
    Each process of pytest-xdist uses its own part of the ports.
    """
    said = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first = int(said.read_text().split()[0]) if said.exists() else 32768
    ours = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    candidates = list(range(min(10_000, first // 2) + ours, first, count))
    secrets.SystemRandom().shuffle(candidates)
    for port in candidates:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:  # somebody has it, or nobody may
                continue
        if port not in _given:
            _given.add(port)
            return port
    raise OSError("no port is free")


@dataclass(kw_only=True)
class Server:
    """One child process that answers 200 on `ready_url` when it can take requests."""

    log: Path  # both output streams; overwritten at each start
    ready_seconds: float = 600.0  # the deadline; a busy two-core machine needs a minute for vLLM
    process: subprocess.Popen[bytes] | None = field(default=None, init=False, repr=False)
    _guard: contextlib.ExitStack = field(
        default_factory=contextlib.ExitStack, init=False, repr=False
    )

    def command(self) -> list[str]:
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        raise NotImplementedError

    @property
    def ready_url(self) -> str:
        raise NotImplementedError

    def ready(self) -> bool:
        return answers(self.ready_url)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Returns when the server is ready; `ServerFailed` leaves nothing running."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._guard.close()  # of a server that ended by itself, and is started again
        words, pipe = self._guard.enter_context(guarded(self.command()))
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                words,
                env=os.environ | self.environment(),
                cwd=self.log.parent,
                stdin=pipe,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def _wait(self) -> None:
        deadline = time.monotonic() + self.ready_seconds
        while not self.ready():
            assert self.process is not None
            if (code := self.process.poll()) is not None:
                raise ServerFailed(f"{self._name} ended with code {code}\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise ServerFailed(
                    f"{self._name} not ready after {self.ready_seconds:.0f} s\n{self.log_tail()}"
                )
            time.sleep(0.2)

    def stop(self) -> None:
        """SIGTERM to the group, SIGKILL to whatever of it is left; safe to call twice."""
        if self.process is None:
            return
        process, self.process = self.process, None
        signal_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        signal_group(process.pid, signal.SIGKILL)
        process.wait()
        self._guard.close()

    @property
    def _name(self) -> str:
        return type(self).__name__

    def log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join([f"--- end of {self.log}", *lines[-LOG_TAIL_LINES:]])


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except urllib.error.HTTPError as error:
        error.close()
        return False
    except OSError:
        return False


def signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
