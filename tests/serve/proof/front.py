"""An address behind which one server takes another's place without the port ever being closed."""

import asyncio
import contextlib
from typing import Self

from tests.fake_servers import FakeOpenAI

__all__ = ["Front"]


class Front:
    """Passes bytes on to a server; `undecided` connections wait until they know which."""

    def __init__(self, server: FakeOpenAI) -> None:
        self._server = server
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.decide = asyncio.Event()
        self.decide.set()
        self.undecided = 0

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_error: object) -> None:
        self._listener.close()
        self._end(reset=False)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def swap(self, server: FakeOpenAI, *, reset: bool) -> None:
        """Every connection ends; the next ones are `server`'s."""
        self._server = server
        self._end(reset=reset)

    def _end(self, *, reset: bool) -> None:
        for writer in self._writers:
            writer.transport.abort() if reset else writer.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.undecided += 1
        await self.decide.wait()
        self.undecided -= 1
        host, _, port = self._server.url.removeprefix("http://").partition(":")
        theirs, to_them = await asyncio.open_connection(host, int(port))
        self._writers.add(writer)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_copy(reader, to_them))
                group.create_task(_copy(theirs, writer))
        finally:
            self._writers.discard(writer)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await reader.read(65536):
            writer.write(piece)
            await writer.drain()
    writer.close()
