"""A stand-in for the `vllm` command: a fake server in a process of its own.

Options that real vLLM does not have make it misbehave: `--broken` ends with a traceback before it
listens, `--broken-by FILE` does so while the file is there, `--hang` never listens, `--late FILE`
does not listen while the file is there, `--dead-after N` reports a dead engine after N seconds,
`--slow N` takes N seconds for each token, and `--hold FILE` answers no request while the file is
there. `--engine` starts a process beside the server, which ignores SIGTERM, as vLLM's does while it
starts.
"""

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.layout import ROOT

__all__ = ["write_vllm"]

TRACEBACK = """Traceback (most recent call last):
  File "engine.py", line 1, in <module>
ValueError: no kernel can run this
RuntimeError: Engine core initialization failed. See root cause above."""


def write_vllm(path: Path) -> Path:
    """Writes the command to `path`, and returns it."""
    path.write_text(
        f"#!{sys.executable}\n"
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from tests.fake_servers.vllm_command import main; main(sys.argv[1:])\n"
    )
    path.chmod(0o755)
    return path


def main(words: list[str]) -> None:
    def there(name: str) -> bool:
        return name in words and Path(words[words.index(name) + 1]).exists()

    print(f"INFO starting {' '.join(words)}", flush=True)
    if "--engine" in words:
        subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 600; :"])
    if "--broken" in words or there("--broken-by"):
        print(TRACEBACK, file=sys.stderr)
        sys.exit(1)
    asyncio.run(serve(words))


class FileGate(threading.Event):
    """A gate that is closed while a file is there, so that another process can close it."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = Path(path)

    def wait(self, timeout: float | None = None) -> bool:
        while self.path.exists():
            time.sleep(0.01)
        return True


async def serve(words: list[str]) -> None:
    from tests.fake_servers import FakeOpenAI

    def number(name: str) -> float:
        return float(words[words.index(name) + 1]) if name in words else 0.0

    if "--hang" in words:
        await asyncio.Event().wait()
    while "--late" in words and Path(words[words.index("--late") + 1]).exists():
        await asyncio.sleep(0.01)
    server = FakeOpenAI(delay_s=number("--slow"))
    if "--hold" in words:
        server.runner.gate = FileGate(words[words.index("--hold") + 1])
    await server.start(int(number("--port")))
    if seconds := number("--dead-after"):
        await asyncio.sleep(seconds)
        print("EngineDeadError: the engine is gone", flush=True)
        server.healthy = False
    await asyncio.Event().wait()
