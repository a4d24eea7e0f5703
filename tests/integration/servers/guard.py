"""Ends a process group when the process that started it has ended, however it ended.

    python guard.py GROUP     with a pipe as standard input; its starter holds the other end

A killed test run stops no server, and a signal to the run does not reach its servers, which have
process groups of their own. But the kernel closes the pipes of every process that ends. The guard
then sends SIGTERM to GROUP, and SIGKILL after a while. A starter that has stopped the group itself
writes a line to the pipe, and the guard exits.
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
