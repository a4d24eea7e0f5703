"""Requests /health again and again, in a process of its own; prints the slowest answer at the end.

`python -m tests.hostile.monitor PORT PID`, until its standard input ends. What the kernel kept the
gateway (PID) or this process waiting for a processor is subtracted: other programs cause that.
"""

import contextlib
import json
import select
import socket
import sys
import time
from pathlib import Path

EVERY_S = 0.005
REQUEST = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


def waited_s(pid: str) -> float:
    """Returns how long the threads of the process have waited for a processor: schedstat.

    All threads: one that decodes a body holds the interpreter's lock while it waits.
    """
    waited_ns = 0
    for found in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, IndexError):  # it has ended
            waited_ns += int(found.read_text().split()[1])
    return waited_ns / 1e9


def main() -> None:
    port, pid = int(sys.argv[1]), sys.argv[2]
    slowest_s, count = 0.0, 0
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        while not select.select([sys.stdin], [], [], EVERY_S)[0]:
            before_s = waited_s(pid) + waited_s("self")
            began = time.monotonic()
            connection.sendall(REQUEST)
            answer = b""
            while not answer.endswith(b'{"status":"alive"}'):
                piece = connection.recv(4096)
                assert piece, f"the gateway closed the connection after {answer!r}"
                answer += piece
            assert answer.startswith(b"HTTP/1.1 200")
            took_s = time.monotonic() - began
            slowest_s = max(slowest_s, took_s - (waited_s(pid) + waited_s("self") - before_s))
            count += 1
    print(json.dumps({"slowest_s": slowest_s, "answers": count}))


if __name__ == "__main__":
    main()
