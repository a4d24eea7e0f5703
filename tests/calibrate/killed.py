"""Runs that are killed at every step of their work, and continued.

`python -m tests.calibrate.killed MODEL DIRECTORY` is a process of its own, which forks: importing
torch takes longer than a run. It goes through HOWS, which say what activations the journal keeps:
"every layer", those "in between" (of every other), "none", or those that are "spilled"; "restart"
begins anew over the journal of a run that had finished two layers.

Prints a line of JSON for each moment: {"how", "moment", "finished": layers that the journal held
then, "same": whether the continued run gave the very counts}.
"""

import gc
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from calibrate.journal import directory as journal_files
from calibrate.journal import journal
from calibrate.journal.activations import ActivationFiles
from tests.calibrate.runs import interrupt_after, run, save_counts

EVERY = 5  # of the moments, one is tried
HOWS = ("every layer", "in between", "none", "spilled", "restart")


def main(model: Path, directory: Path) -> None:
    run(model)  # imports all that a run needs, for every child
    gc.freeze()  # the search for cycles would copy every page of it, in every child
    for how in HOWS:
        place = directory / how
        place.mkdir()
        killed = forked(partial(try_moments, model, place, how))
        assert not killed


def try_moments(model: Path, directory: Path, how: str) -> None:
    """Kills runs at their moments one after the other, and continues each."""
    save_counts(directory / "whole", run(model))
    settings: dict[str, Any] = {"spill": directory / "spill"} if how == "spilled" else {}
    keep(how)
    path, moment = directory / "journal", 1
    begun = directory / "begun"
    if how == "restart":
        with suppress(KeyboardInterrupt):
            run(model, begun, advance=interrupt_after(5 / 6), **settings)  # in the third layer
    while forked(partial(run_until, moment, model, path, begun, settings)):
        resume(model, directory, settings, how=how, moment=moment)
        moment += EVERY

    # And from outside, at no step in particular: some time after the second layer was finished.
    save_counts(directory / "whole", run(model, count=20))
    for delay_s in (0.0, 0.01):
        shutil.rmtree(path, ignore_errors=True)
        child = os.fork()
        if not child:
            run(model, path, count=20, **settings)
            os._exit(0)
        while not (path / "layer-001.json").exists():
            time.sleep(0.001)
        time.sleep(delay_s)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        resume(model, directory, settings, how=how, moment=f"{delay_s} s", count=20)


def keep(how: str) -> None:
    """Has the journal keep the activations that `how` says."""
    if how == "in between":
        asked = 0

        def due(_: journal.Journal) -> bool:
            nonlocal asked
            asked += 1
            return asked % 2 == 0

        journal.Journal.due = due  # type: ignore[method-assign]
    else:
        journal.KEEP_EVERY_S = 3600.0 if how == "none" else 0.0


def run_until(moment: int, model: Path, path: Path, begun: Path, settings: dict[str, Any]) -> None:
    """Is killed at `moment` of a run; it begins anew over a copy of `begun` if that exists."""
    shutil.rmtree(path, ignore_errors=True)
    if begun.exists():
        shutil.copytree(begun, path)
    die_at(moment)
    run(model, path, restart=begun.exists(), **settings)


def resume(
    model: Path,
    directory: Path,
    settings: dict[str, Any],
    *,
    how: str,
    moment: int | str,
    count: int = 5,
) -> None:
    path = directory / "journal"
    finished = len(list(path.glob("layer-*.json")))
    again = partial(run, model, path, count=count, **settings)
    killed = forked(lambda: save_counts(directory / "resumed", again()))
    assert not killed
    same = (directory / "whole").read_bytes() == (directory / "resumed").read_bytes()
    told = {"how": how, "moment": moment, "finished": finished, "same": same}
    print(json.dumps(told), flush=True)


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
        (journal, "flush"),
        (journal_files, "flush"),
        (journal.os, "replace"),
        (journal.os, "unlink"),
        (journal.shutil, "rmtree"),
    ):
        counted(owner, name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
