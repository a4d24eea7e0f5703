"""The demo can be interrupted, and started again."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.layout import ROOT


@pytest.mark.parametrize("after_s", [0.5, 1.0, 3.0])
def test_an_interrupted_demo_prints_no_traceback(after_s: float, tmp_path: Path) -> None:
    """A terminal sends SIGINT to the demo and to the command that it runs."""
    # While Python itself starts, it answers SIGINT with a traceback: each process says when it has.
    started = tmp_path / "started"
    started.mkdir()
    (started / "sitecustomize.py").write_text(
        f"import os, pathlib\npathlib.Path({str(started)!r}, f'{{os.getpid()}}.pid').touch()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "examples/demo.py", "--out", str(tmp_path / "demo")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {"PYTHONPATH": f"{started}{os.pathsep}{ROOT}"},
        start_new_session=True,
    )
    assert process.stdout is not None
    shown = b""
    while b"$ octet calibrate" not in shown:
        shown += os.read(process.stdout.fileno(), 4096)
    while len(list(started.glob("*.pid"))) < 2:
        time.sleep(0.01)
    time.sleep(after_s)
    os.killpg(process.pid, signal.SIGINT)
    shown += process.stdout.read()
    process.stdout.close()
    assert process.wait() == 130, shown
    assert b"Traceback" not in shown
    assert shown.endswith(b"stopped; `make demo` again continues\n")
