"""Starts vLLM on an exported checkpoint, waits until it is ready, and stops it.

    with VllmServer(Path("my-model-fp8"), log=Path("vllm.log")) as server:
        ...  # OpenAI's API at server.url

The flags that the checkpoint needs come from its manifest. A first start on a machine compiles
kernels for minutes; they stay in caches under the home directory, so later starts take seconds.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self
from urllib.request import ProxyHandler, Request, build_opener

from octet.errors import BackendError
from serve.vllm.command import (
    artifact_flags,
    gpus,
    require_checkpoint,
    require_command,
    start_variables,
)
from serve.vllm.process import child_process, free_port, last_line

__all__ = ["VllmServer", "complete", "complete_every_length"]

_READY_SECONDS = 1200.0  # a first start compiles kernels for up to five minutes
_POLL_SECONDS = 0.2
_LONGEST = 8192  # tokens that vLLM computes in one step, by default on large GPUs


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
        require_checkpoint(checkpoint)
        require_command(command)
        self.checkpoint, self.log, self.command = checkpoint, log, command
        self.options = [*artifact_flags(checkpoint), *options]
        self.environment = start_variables(checkpoint, gpus()) | dict(environment or {})
        self.port = free_port()
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


def complete(server: VllmServer) -> None:
    """Generates a few tokens, greedily; raises BackendError if the server does not answer."""
    _send(server, lambda context: [list(range(1, 65))], tokens=8)


def complete_every_length(server: VllmServer) -> None:
    """Sends prompts of many lengths, so that kernels which are chosen by the length are compiled.

    Lengths are multiples of 8 up to 64, then of 64 up to 8,192 tokens: 64 is the smallest tile of
    DeepGEMM. No two prompts begin alike, so none is in the prefix cache. Raises BackendError if the
    server does not answer.
    """

    def prompts(context: int) -> Iterator[list[int]]:
        for length in (*range(8, 64, 8), *range(64, _LONGEST + 1, 64)):
            if length < context:
                yield [1 + length % 61, 1 + length // 61 % 61, *[1] * (length - 2)]

    _send(server, prompts, tokens=1)


def _send(
    server: VllmServer, prompts: Callable[[int], Iterable[list[int]]], *, tokens: int
) -> None:
    """Sends the prompts that `prompts` returns for the server's context in tokens, in turn."""
    opener = build_opener(ProxyHandler({}))
    try:
        with opener.open(f"{server.url}/v1/models", timeout=60) as answer:
            model = json.load(answer)["data"][0]
        for prompt in prompts(model.get("max_model_len") or _LONGEST):
            body = {"model": model["id"], "prompt": prompt, "max_tokens": tokens, "temperature": 0}
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
