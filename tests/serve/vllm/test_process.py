"""Processes that Octet starts, and what becomes of them when one of those involved is killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from serve.vllm.process import child_process
from tests.layout import ROOT
from tests.serve.process import members

# Takes no notice of SIGTERM, like a vLLM that starts; its engine is a process of its own.
STUBBORN = """
import os, signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", "600"])
os.write(1, b"starting\\n")  # two share a pipe, and print may write a line in two parts
time.sleep(600)
"""
# Starts some of them, and then something else, which must not keep them alive.
OCTET = """
import contextlib, subprocess, sys, time
from serve.vllm.process import child_process
with contextlib.ExitStack() as stack:
    for words in 2 * [[sys.executable, "-S", "-c", sys.argv[1]]]:
        print(stack.enter_context(child_process(words, sys.stderr.buffer, {})).pid, flush=True)
    print(subprocess.Popen(["sleep", "600"], start_new_session=True).pid, flush=True)
    time.sleep(600)
"""
SERVER = [sys.executable, "-S", "-c", STUBBORN]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_nothing_outlives_the_process_that_wants_it() -> None:
    octet = subprocess.Popen(
        [sys.executable, "-c", OCTET, STUBBORN],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert octet.stdout is not None and octet.stderr is not None
    first, second, other = (int(octet.stdout.readline()) for _ in range(3))
    try:
        assert [octet.stderr.readline() for _ in range(2)] == 2 * ["starting\n"]
        for group in (first, second):
            until(lambda group=group: len(members(group)) == 3)  # server, engine, guard
        octet.kill()
        until(lambda: not members(first) and not members(second))
        assert members(other)
    finally:
        octet.kill()
        os.kill(other, signal.SIGKILL)
        octet.communicate()


def test_an_engine_ends_with_its_server(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log, child_process(SERVER, log, {}) as server:
        until(lambda: len(members(server.pid)) == 3)
        server.kill()
        assert server.wait() == -signal.SIGKILL
        until(lambda: not members(server.pid))


def test_nothing_is_left_after_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.vllm.process.STOP_S", 0.2)
    before = os.listdir("/proc/self/fd")
    with (tmp_path / "log").open("wb") as log, child_process(SERVER, log, {}) as server:
        until(lambda: len(members(server.pid)) == 3)
    until(lambda: not members(server.pid))
    assert os.listdir("/proc/self/fd") == before


def test_a_guarded_command_is_like_any_other(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "print(sys.argv[1:], os.environ['NAME'], sys.stdin.read(), os.listdir('/proc/self/fd'))\n"
        "sys.exit(7)"
    )
    path = tmp_path / "log"
    words = [sys.executable, "-c", code, "a b", "--port", "é"]
    with path.open("wb") as log, child_process(words, log, {"NAME": "value"}) as process:
        assert process.wait() == 7
    assert path.read_text() == "['a b', '--port', 'é'] value  ['0', '1', '2', '3']\n"
    with path.open("wb") as log, child_process(["no-such-vllm"], log, {}) as process:
        assert process.wait() == 1
    assert path.read_text() == "error: no-such-vllm: No such file or directory\n"
