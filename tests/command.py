"""Runs the command line in this process: `octet` starts slower than most commands run."""

import io
import signal
import subprocess
from contextlib import redirect_stderr, redirect_stdout

import pytest

from octet_cli import main as cli

__all__ = ["octet"]


def octet(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs `octet` with these arguments; returns its output and exit code as a process would."""
    words = [str(argument) for argument in arguments]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    out, errors = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(errors), pytest.raises(SystemExit) as ended:
            cli.main(words)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    code = 0 if ended.value.code is None else int(ended.value.code)
    return subprocess.CompletedProcess(words, code, out.getvalue(), errors.getvalue())
