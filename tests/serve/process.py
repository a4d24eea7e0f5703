"""The command in a process of its own, and the processes of a group."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["members", "octet_serve"]

# As `python -m octet_cli.main`, but Linux kills it when whoever started it ends, be it killed
# itself: a test run that is interrupted leaves nothing behind. 1 is PR_SET_PDEATHSIG, 9 SIGKILL.
MAIN = """
import ctypes, os, runpy, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
    if os.getppid() != int(sys.argv.pop(1)):
        sys.exit("whoever started this has gone")
runpy.run_module("octet_cli.main", run_name="__main__", alter_sys=True)
"""


@contextmanager
def octet_serve(config: Path) -> Iterator[subprocess.Popen[str]]:
    """`octet serve` on a free port, killed if the test forgets it."""
    parent = [str(os.getpid())] if sys.platform == "linux" else []
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, *parent, "serve", "--config", str(config), "--port", "0"],
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONWARNINGS": "error"},
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def members(group: int) -> list[int]:
    """The processes of a group, without those that have ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, its_group, *_ = (path / "stat").read_text().rpartition(")")[2].split()
            if int(its_group) == group and state not in "XZ":
                found.append(int(path.name))
    return found
