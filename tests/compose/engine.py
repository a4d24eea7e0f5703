"""A Docker engine of our own: its socket, its images and its network touch no other's.

It runs in namespaces of network and mounts (`unshare --net --mount`) that hold nothing but the
loopback interface, so its bridges, firewall rules and mounts end with it, and no container reaches
anything outside.
"""

import json
import os
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from tests.compose.prepare import PREPARED

__all__ = ["Engine", "EngineError", "alone"]


class EngineError(Exception):
    """A command of Docker that failed, with the end of what it printed."""


def alone() -> bool:
    """Tells whether nothing outside can be reached, as in a namespace of our own."""
    routes = Path("/proc/self/net/route").read_text().splitlines()[1:]
    return not any(line.split()[1] == "00000000" for line in routes)


class Engine:
    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="engine-", dir=PREPARED))
        self.socket = self.directory / "docker.sock"

    def __enter__(self) -> Self:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        self._log = (self.directory / "log").open("wb")
        self._process = subprocess.Popen(
            [
                *("dockerd", "--host", f"unix://{self.socket}"),
                *("--data-root", self.directory / "data", "--exec-root", self.directory / "exec"),
                *("--pidfile", self.directory / "pid", "--storage-driver", "overlay2"),
            ],
            stdout=self._log,
            stderr=self._log,
        )
        try:
            self._wait_until_it_answers()
        except EngineError:
            self.__exit__()
            raise
        return self

    def _wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + 60
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise EngineError(f"dockerd does not start: {self._last_lines()}")
            time.sleep(0.2)

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=60)
        self._process.kill()
        self._log.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def environment(self) -> dict[str, str]:
        # The builder of Docker 20 is enough, and needs no plugin.
        return os.environ | {"DOCKER_HOST": f"unix://{self.socket}", "DOCKER_BUILDKIT": "0"}

    def run(
        self, *command: str | Path, stdin: str | None = None, timeout_s: float = 600, **env: str
    ) -> str:
        """Runs `command` against this engine; returns what it printed."""
        done = subprocess.run(
            command,
            env=self.environment() | env,
            input=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
        if done.returncode != 0:
            words = " ".join(map(str, command))
            raise EngineError(f"{words}\nended with {done.returncode}: {done.stdout[-3000:]}")
        return done.stdout

    def docker(self, *arguments: str | Path, stdin: str | None = None) -> str:
        return self.run("docker", *arguments, stdin=stdin)

    def inspect(self, container: str) -> dict[str, Any]:
        (found,) = json.loads(self.docker("inspect", container))
        state: dict[str, Any] = found
        return state

    def _answers(self) -> bool:
        probe = ["docker", "--host", f"unix://{self.socket}", "version"]
        return subprocess.run(probe, capture_output=True).returncode == 0

    def _last_lines(self) -> str:
        return "".join((self.directory / "log").read_text().splitlines(keepends=True)[-3:])
