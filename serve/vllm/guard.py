"""Ends a command, and all that it started, when its caller ends.

    python -I -S guard.py WORDS...     in a new session; standard input is a pipe

The caller holds the other end of the pipe, which the kernel closes however the caller ends. This
process becomes the command. A child of it, the guard, waits until the pipe is closed or the command
has ended, and then kills the process group.

The guard is of that group itself: as long as it lives, no other group can get the group's number.
It ignores the signals that it sends, except SIGKILL, the last one.
"""

import os
import select
import signal
import sys
import time

__all__ = ["run", "watch"]

_GRACE_S = 5.0  # from SIGTERM to SIGKILL; a vLLM that serves ends within 3 s
_POLL_S = 0.2


def run(words: list[str]) -> None:
    """Starts the guard, and becomes the command."""
    nothing = os.open(os.devnull, os.O_RDWR)
    if os.fork() == 0:
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        os.dup2(nothing, 1)  # or the reader of the command's output would wait for the guard
        os.dup2(nothing, 2)
        # Another process image, or the command would seem to run twice.
        os.execv(sys.executable, [sys.executable, "-I", "-S", __file__])
    os.dup2(nothing, 0)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(words[0], words)
    except OSError as error:
        sys.exit(f"error: {words[0]}: {error.strerror}")


def watch() -> None:
    """Ends the group of this process, once the pipe is closed or the command has ended."""
    command = os.getpgrp()
    while os.getppid() == command and not select.select([0], [], [], _POLL_S)[0]:
        pass
    os.killpg(command, signal.SIGTERM)
    end = time.monotonic() + _GRACE_S
    while os.getppid() == command and time.monotonic() < end:
        time.sleep(_POLL_S)
    os.killpg(command, signal.SIGKILL)


if __name__ == "__main__":
    run(sys.argv[1:]) if sys.argv[1:] else watch()
