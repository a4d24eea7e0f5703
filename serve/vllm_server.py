"""Starts vLLM on an exported checkpoint, waits until it is ready, and stops it.

    with VllmServer(Path("my-model-fp8"), log=Path("vllm.log")) as server:
        ...  # OpenAI's API at server.url

The flags that the checkpoint needs come from its manifest. A first start on a machine compiles
kernels for minutes; they stay in caches under the home directory, so later starts take seconds.
"""

import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Self
from urllib.request import ProxyHandler, Request, build_opener

from octet.artifacts.manifest import MANIFEST_FILE, Manifest
from octet.errors import ArtifactError, BackendError, ConfigError
from octet.model.not_a_checkpoint import explain_missing, is_hub_name

__all__ = [
    "VllmServer",
    "cache_variables",
    "child_process",
    "complete",
    "last_line",
    "require_command",
]

_STOP_SECONDS = 10.0  # from SIGTERM to SIGKILL
_READY_SECONDS = 1200.0  # a first start compiles kernels for up to five minutes
_POLL_SECONDS = 0.2
_ERROR = re.compile(r"(^|\s|\.)[A-Z]\w+Error: |\berror: ")  # of Python, and of argparse
_SERVE_WITH = re.compile(r"(--kv-cache-dtype fp8_e[45]m[23])?")
_PR_SET_PDEATHSIG = 1  # prctl(2)


class VllmServer:
    """A vLLM server on 127.0.0.1 that lives as long as the `with` block.

    `checkpoint` is an export, or an unquantized checkpoint. `options` are added to the flags that
    the checkpoint needs, and come last, so they win.
    """

    def __init__(
        self,
        checkpoint: Path,
        *,
        log: Path,
        command: str = "vllm",
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Raises ConfigError if there is no such checkpoint or command, or no free port."""
        if is_hub_name(checkpoint):
            raise explain_missing(checkpoint)
        if not (checkpoint / "config.json").is_file():
            raise ConfigError(f"{checkpoint}: no checkpoint (no config.json): give an exported one")
        require_command(command)
        self.checkpoint, self.log, self.command = checkpoint, log, command
        self.options = [*_flags(checkpoint), *options]
        self.environment = dict(environment or {})
        self.port = _free_port()
        self._process: Any = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self.start()
        try:
            self.wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Starts the server, and returns at once; `log` gets its output."""
        words = [self.command, "serve", str(self.checkpoint.resolve())]
        words += ["--host", "127.0.0.1", "--port", str(self.port), *self.options]
        self._output = self.log.open("wb")
        self._process = child_process(words, self._output, self.environment)
        self._child = self._process.__enter__()

    def wait(self, seconds: float = _READY_SECONDS) -> None:
        """Returns when the server is ready; raises BackendError if it ends, or takes longer."""
        opener = build_opener(ProxyHandler({}))
        end = time.monotonic() + seconds
        while True:
            with suppress(OSError), opener.open(f"{self.url}/health", timeout=5):
                return
            if (code := self._child.poll()) is not None:
                raise BackendError(
                    f"{self.checkpoint}: vLLM ended with code {code} before it was ready:"
                    f" {last_line(self.log)}; its whole output is in {self.log}"
                )
            if time.monotonic() > end:
                raise BackendError(
                    f"{self.checkpoint}: vLLM was not ready after {seconds:.0f} s; its output is in"
                    f" {self.log}"
                )
            time.sleep(_POLL_SECONDS)

    def stop(self) -> None:
        """Ends every process of the server; may be called twice."""
        if self._process is not None:
            process, self._process = self._process, None
            process.__exit__(None, None, None)
            self._output.close()


@contextmanager
def child_process(
    words: Sequence[str], output: IO[bytes], environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a command in a process group of its own; nothing of it runs after the block.

    On Linux it also gets SIGTERM if this process is killed.
    """
    process = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=os.environ | dict(environment),
        start_new_session=True,
        preexec_fn=_end_with_parent,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def complete(server: VllmServer) -> None:
    """Generates a few tokens, greedily; raises BackendError if the server does not answer."""
    opener = build_opener(ProxyHandler({}))
    try:
        with opener.open(f"{server.url}/v1/models", timeout=60) as answer:
            model = json.load(answer)["data"][0]["id"]
        body = {"model": model, "prompt": list(range(1, 65)), "max_tokens": 8, "temperature": 0}
        request = Request(
            f"{server.url}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        with opener.open(request, timeout=_READY_SECONDS) as answer:
            answer.read()
    except (OSError, ValueError, LookupError) as error:
        raise BackendError(
            f"{server.checkpoint}: vLLM started and does not answer: {error}; its output is in"
            f" {server.log}"
        ) from None


def cache_variables(directory: Path) -> dict[str, str]:
    """Returns the environment variables that move the kernel caches of vLLM to `directory`.

    vLLM's own holds what torch.compile and DeepGEMM make.
    """
    return {
        "VLLM_CACHE_ROOT": str(directory / "vllm"),
        "FLASHINFER_WORKSPACE_BASE": str(directory),
        "TRITON_CACHE_DIR": str(directory / "triton"),
    }


def require_command(command: str) -> None:
    """Raises ConfigError if there is no such vllm command."""
    if shutil.which(command) is None:
        raise ConfigError(
            f"--vllm {command}: no such command: pip install 'octet-llm[vllm]', or give the path of"
            " an installed vllm"
        )


def last_line(log: Path) -> str:
    """Returns the line of a log that names the cause of a failure, or else its last line."""
    lines = [line.strip() for line in log.read_text("utf-8", "replace").split("\n")]
    lines = [line for line in lines if line]
    # vLLM's first process ends with an error that only points to the one of its engine.
    at = [
        number
        for number, line in enumerate(lines)
        if _ERROR.search(line) and "Engine core initialization failed" not in line
    ]
    if not at:
        return lines[-1][-300:] if lines else "it wrote nothing"
    found = lines[at[-1]]
    if "ValidationError: " in found:  # pydantic's: the reason is in the next line
        found = " ".join(lines[at[-1] : at[-1] + 2])
    return found[:300]


def _flags(checkpoint: Path) -> list[str]:
    """Returns the options of `vllm serve` that an export needs; none for another checkpoint."""
    if not (checkpoint / MANIFEST_FILE).exists():
        return []
    manifest = Manifest.load(checkpoint, "checkpoint", verify=False)
    recorded = manifest.details.get("serve_with") or ""
    if not _SERVE_WITH.fullmatch(recorded) or manifest.model.name.startswith("-"):
        raise ArtifactError(  # `vllm serve` has options that run code, such as --trust-remote-code
            f"{checkpoint / MANIFEST_FILE}: {recorded!r} with model {manifest.model.name!r} is not"
            f" what an export records for vllm serve; {manifest.remedy}"
        )
    flags = recorded.split()
    if (ways := manifest.details.get("tensor_parallel", 1)) > 1:
        flags += ["--tensor-parallel-size", str(ways)]
    return [*flags, "--served-model-name", manifest.model.name]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _end_with_parent() -> None:
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
