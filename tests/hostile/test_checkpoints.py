"""Hostile checkpoints and artifacts end in one clear line, soon, in little memory, without a trace.

`checkpoints.py` is the table. Each is given to the readers and to the commands that open it.
"""

import re
import resource
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from octet.errors import OctetError
from octet.model.checkpoint import Checkpoint
from tests.command import octet
from tests.hostile.checkpoints import CHECKPOINTS, write_checkpoint
from verify.reader.checkpoint import Written

READING, COMMAND = 2.0, 6.0  # seconds of CPU time
MEMORY = 1 << 30  # of address space, beyond what the process has


@contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """Limits what happens in it: exceeding memory raises MemoryError, exceeding time fails."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, hard))
    began = time.process_time()
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))
    assert time.process_time() - began < seconds


def require_line(text: str, where: Path) -> None:
    """Asserts that an error is one line that a terminal may show, and names a path."""
    assert text.isprintable() and len(text) <= 4500, text
    assert str(where) in text


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("good") / "model"
    write_checkpoint(path)
    Checkpoint.open(path)
    # Imports what the commands need, which takes seconds.
    assert "right so far: names, scales and files" in octet("verify", path).stdout
    octet("calibrate", path, "--samples", path / "nothing", "--out", path / "out")
    return path


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_hostile_checkpoint_is_refused_in_one_line(
    name: str, good: Path, tmp_path: Path, tiny_samples: Path
) -> None:
    change, found = CHECKPOINTS[name]
    path = Path(shutil.copytree(good, tmp_path / "model"))
    change(path)
    with bounded(READING), pytest.raises(OctetError) as caught:
        Checkpoint.open(path)
    require_line(str(caught.value), path)
    assert re.search(found, str(caught.value)), caught.value

    with bounded(READING):  # a reader of its own, which may take what quantizers write
        try:
            Written.open(path)
        except OctetError as error:
            require_line(str(error), path)
    if any(file.is_file() and file.stat().st_blocks * 512 > 1 << 20 for file in path.glob("*.*s*")):
        return  # seconds of the same
    for command in (
        ("verify", path, "--no-tokens"),
        ("calibrate", path, "--samples", tiny_samples, "--out", tmp_path / "out"),
    ):
        with bounded(COMMAND):
            ended = octet(*command)
        assert ended.returncode in (1, 2), ended
        assert "Traceback" not in ended.stderr + ended.stdout
        if ended.stderr:  # otherwise, what is wrong is in the table of `octet verify`
            assert ended.stderr.count("\n") == 1 and ended.stderr.startswith("error: ")
            require_line(ended.stderr[:-1], path)
    assert not (tmp_path / "out").exists() and {*tmp_path.iterdir()} == {path}
