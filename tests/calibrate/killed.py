"""Runs that are killed at every step of their work, and continued.

`python -m tests.calibrate.killed MODEL DIRECTORY` is a process of its own, which forks: importing
torch takes longer than a run.

Prints a line of JSON for each moment: {"moment", "finished": layers that the journal held then,
"same": whether the continued run gave the very counts}.
"""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from calibrate import journal
from calibrate.activations import ActivationFiles
from tests.calibrate.runs import run, save_counts

EVERY = 5  # of the moments, one is tried


def main(model: Path, directory: Path) -> None:
    save_counts(directory / "whole", run(model))
    path, moment = directory / "journal", 1
    while forked(partial(run_until, moment, model, path)):
        resume(model, directory, moment=moment)
        moment += EVERY

    # And from outside, at no step in particular: some time after the second layer was finished.
    save_counts(directory / "whole", run(model, count=20))
    for delay_s in (0.0, 0.01):
        shutil.rmtree(path, ignore_errors=True)
        child = os.fork()
        if not child:
            run(model, path, count=20)
            os._exit(0)
        while not (path / "layer-001.json").exists():
            time.sleep(0.001)
        time.sleep(delay_s)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        resume(model, directory, moment=f"{delay_s} s", count=20)


def run_until(moment: int, model: Path, path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    die_at(moment)
    run(model, path)


def resume(model: Path, directory: Path, *, moment: int | str, count: int = 5) -> None:
    path = directory / "journal"
    finished = len(list(path.glob("layer-*.json")))
    killed = forked(lambda: save_counts(directory / "resumed", run(model, path, count=count)))
    assert not killed
    same = (directory / "whole").read_bytes() == (directory / "resumed").read_bytes()
    print(json.dumps({"moment": moment, "finished": finished, "same": same}), flush=True)


def forked(work: Callable[[], Any]) -> bool:
    """Does `work` in a child; whether the child was killed."""
    child = os.fork()
    if not child:
        try:
            work()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def die_at(moment: int) -> None:
    """From now on, the `moment`-th step that leaves a trace on the disk is this process's last."""
    left = moment

    def counted(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def step(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 2  # before it and after it are two moments
            if left <= 0 and left == -1:
                os.kill(os.getpid(), signal.SIGKILL)
            result = original(*args, **kwargs)
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(owner, name, step)

    for owner, name in (
        (ActivationFiles, "write"),
        (journal, "write_tensors"),
        (journal.os, "replace"),
        (journal.shutil, "rmtree"),
    ):
        counted(owner, name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
