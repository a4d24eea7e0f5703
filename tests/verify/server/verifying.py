"""`octet verify URL` of a fake server, and what it said."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from octet_cli.main import main
from tests import patient_loop
from tests.fake_servers import running

__all__ = ["Verify", "run_verify", "serving", "words"]

Verify = Callable[..., tuple[int, str, str]]


@contextmanager
def serving(server: Any) -> Iterator[Any]:
    """A fake server in a thread of its own: the command runs an event loop itself."""
    up, down = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def run() -> None:
        async with running(server):
            up.set()
            await down.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    try:
        assert up.wait(60)
        yield server
    finally:
        loop.call_soon_threadsafe(down.set)
        thread.join()
        loop.close()


def words(text: str) -> str:
    """On one line, however it was wrapped."""
    return " ".join(text.split())


def run_verify(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `octet verify`."""
    with pytest.MonkeyPatch.context() as patched, pytest.raises(SystemExit) as ended:
        patched.setattr(asyncio, "run", patient_loop.run)
        main(["verify", *map(str, arguments)])
    printed = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, printed.out, printed.err
