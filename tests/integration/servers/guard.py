"""Ends a group of processes when whoever started it is gone, in whatever way.

    python guard.py GROUP     with a pipe as standard input, whose other end its starter holds

A test run that is killed stops no server, and servers have groups of their own, which no signal to
the run reaches. The kernel closes the pipe of any process that ends: then SIGTERM goes to GROUP,
and SIGKILL after a while. A starter that has stopped the group itself says so with a line.
"""

import os
import signal
import sys
import time

STOP_SECONDS = 15.0


def main(group: int) -> None:
    if sys.stdin.buffer.readline():
        return
    for number, patience_s in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, 0.0)):
        try:
            os.killpg(group, number)
            deadline = time.monotonic() + patience_s
            while time.monotonic() < deadline:
                time.sleep(0.1)
                os.killpg(group, 0)
        except ProcessLookupError:
            return


if __name__ == "__main__":
    main(int(sys.argv[1]))
