"""Child processes that end with this one, the port that a server gets, and the cause in its log."""

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from octet.errors import ConfigError

__all__ = ["STOP_S", "cause_in", "child_process", "free_port", "guarded", "last_line"]

STOP_S = 8.0  # from SIGTERM to SIGKILL; a gateway closes a pool within 10 s
_ERROR = re.compile(r"(^|\s|\.)[A-Z]\w+Error: |\berror: ")  # of Python, and of argparse
_GUARD = (sys.executable, "-I", "-S", str(Path(__file__).with_name("guard.py")))
_PORTS = range(10_000, 32_768)  # below those that the kernel gives to connections


@contextmanager
def child_process(
    words: Sequence[str], output: IO[bytes], environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a command in a process group of its own; nothing of it runs after the block.

    Nothing runs after the end of this process either, see `guarded`.
    """
    with guarded(words) as (guarded_words, pipe):
        process = subprocess.Popen(
            guarded_words,
            stdin=pipe,
            stdout=output,
            stderr=output,
            env=os.environ | dict(environment),
            start_new_session=True,
        )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def guarded(words: Sequence[str]) -> Iterator[tuple[list[str], int]]:
    """Yields what to execute in a new session for `words`, and its standard input.

    The whole process group ends when this process ends, even by SIGKILL, or when the command does.
    """
    read, write = os.pipe()  # no other child inherits them
    try:
        yield [*_GUARD, *words], read
    finally:
        os.close(read)
        os.close(write)


def free_port() -> int:
    """Returns a port of 127.0.0.1 that nothing listens on. Raises ConfigError if there is none.

    vLLM listens a minute later. Until then the kernel must not give the port to a connection.
    """
    for _ in range(100):
        port = secrets.choice(_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ConfigError(f"no port of 127.0.0.1 from {_PORTS[0]} to {_PORTS[-1]} is free")


def last_line(log: Path) -> str:
    """Returns the line of a log that names the cause of a failure, or else its last line."""
    return cause_in(log.read_text("utf-8", "replace").split("\n"))


def cause_in(lines: Sequence[str]) -> str:
    """Returns the line of a log that names the cause of a failure, or else its last line."""
    lines = [stripped for line in lines if (stripped := line.strip())]
    # vLLM's first process ends with an error that only points to the one of its engine.
    at = [
        number
        for number, line in enumerate(lines)
        if _ERROR.search(line) and "Engine core initialization failed" not in line
    ]
    if not at:
        return lines[-1][-300:] if lines else "it wrote nothing"
    found = lines[at[-1]]
    if "ValidationError: " in found:  # pydantic's: the reason is in the next line
        found = " ".join(lines[at[-1] : at[-1] + 2])
    return found[:300]
