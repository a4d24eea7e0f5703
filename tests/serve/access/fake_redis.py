"""A Redis at the protocol (RESP2): runs the script in a real Lua, by a clock that can be set.

It has the commands that the script and the client call, and the ways in which a Redis fails.
"""

import asyncio
import hashlib
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lupa import lua51

from tests.ports import reserved_port

__all__ = ["FakeRedis"]


class _Refused(Exception):
    """An error reply."""


class FakeRedis:
    """`async with FakeRedis() as redis:` serves on `redis.url` until the block ends."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self.now = now
        self.data: dict[str, Any] = {}
        self.full = False
        self.password: str | None = None
        self.silent = False  # runs commands, and never answers
        self.calls = 0  # of the script
        self.started = now() - 3600  # when it has run for long
        self._scripts: dict[str, str] = {}
        self._functions: dict[str, Any] = {}
        self._lua = lua51.LuaRuntime(unpack_returned_tuples=True)
        self._lua.execute("redis = {}")
        self._lua.globals().redis.call = self._called
        self._lua.execute("redis.error_reply = function(text) return {err = text} end")
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._stack = ExitStack()
        self._port = self._stack.enter_context(reserved_port())

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._port}/0"

    async def __aenter__(self) -> "FakeRedis":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        self._stack.close()

    async def start(self) -> None:
        self.started = min(self.started, self.now())
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)

    async def stop(self) -> None:
        """Ends all connections, as a kill does; scripts are forgotten, data stays."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._writers):
            writer.transport.abort()
        self._scripts.clear()
        self.started = math.inf
        await asyncio.sleep(0)

    async def empty(self) -> None:
        self.data.clear()

    async def set_full(self, full: bool) -> None:
        self.full = full

    async def set_password(self, password: str) -> None:
        self.password = password

    async def put(self, key: str, value: str | dict[str, str]) -> None:
        self.data[key] = value

    async def get(self, key: str) -> Any:
        return self.data.get(key)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        known = self.password is None
        try:
            while line := await reader.readline():
                words = []
                for _ in range(int(line[1:])):
                    size = int((await reader.readline())[1:])
                    words.append((await reader.readexactly(size + 2))[:-2].decode())
                try:
                    known |= words[0].upper() == "AUTH" and words[-1] == self.password
                    if words[0].upper() != "CLIENT" and not known:
                        raise _Refused("NOAUTH Authentication required.")
                    reply = _encoded(self._run(words))
                except _Refused as refused:
                    reply = b"-%s\r\n" % str(refused).encode()
                if not self.silent:
                    writer.write(reply)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    def _run(self, words: list[str]) -> Any:
        name = words[0].upper()
        if name in ("CLIENT", "SELECT", "AUTH"):
            return "OK"
        if name == "SCRIPT":
            digest = hashlib.sha1(words[2].encode()).hexdigest()
            self._scripts[digest] = words[2]
            return digest
        if name == "EVALSHA":
            return self._script(words[1], words[3:5], words[5:])
        if name == "INFO":
            return f"uptime_in_seconds:{int(self.now() - self.started)}\r\n"
        raise _Refused(f"ERR unknown command '{words[0]}'")

    def _script(self, digest: str, keys: list[str], arguments: list[str]) -> list[int]:
        self.calls += 1
        if digest not in self._scripts:
            raise _Refused("NOSCRIPT No matching script. Please use EVAL.")
        lua = self._lua
        lua.globals().KEYS = lua.table_from(keys)
        lua.globals().ARGV = lua.table_from(arguments)
        result = lua.execute(self._scripts[digest])
        if result.err:
            raise _Refused(f"{result.err} script: {digest}, on @user_script:1.")
        return [int(result[i + 1]) for i in range(len(result))]

    def _called(self, name: str, key: str = "", *words: Any) -> Any:
        if name == "TIME":
            micros = int(self.now() * 1e6)
            return self._lua.table_from([str(micros // 10**6), str(micros % 10**6)])
        if name in ("HSET", "PEXPIRE") and self.full:
            raise _Refused("OOM command not allowed when used memory > 'maxmemory'.")
        if name == "EXISTS":
            return int(key in self.data)
        if name == "DEL":
            return int(self.data.pop(key, None) is not None)
        found = self.data.get(key, {})
        if not isinstance(found, dict):
            raise _Refused("WRONGTYPE Operation against a key holding the wrong kind of value")
        if name == "HGETALL":
            return self._lua.table_from([text for pair in found.items() for text in pair])
        if name == "HMGET":
            return self._lua.table_from([found.get(word, False) for word in words])
        if name == "HSET":
            pairs = zip(words[::2], map(_text, words[1::2]), strict=True)
            self.data.setdefault(key, {}).update(pairs)
        elif name == "HDEL":
            for word in words:
                found.pop(word, None)
            if not found:
                self.data.pop(key, None)
        else:
            assert name == "PEXPIRE", name
        return 1


def _text(value: Any) -> str:
    return format(value, ".0f") if isinstance(value, float) else str(value)


def _encoded(reply: str | list[int]) -> bytes:
    if isinstance(reply, str):
        return b"$%d\r\n%s\r\n" % (len(reply), reply.encode())
    return b"*%d\r\n" % len(reply) + b"".join(b":%d\r\n" % number for number in reply)
