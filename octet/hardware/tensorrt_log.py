"""Collects TensorRT's log while it parses, builds, loads and runs: errors, unused inputs, layers.

TensorRT takes one logger per process and ignores any other, so building and serving share this one.
"""

import re
from functools import cache
from typing import Any

from octet.errors import ExportError

__all__ = ["logger", "one_line"]

_SCRATCH = re.compile(r"Total Activation Memory: (\d+) bytes")


@cache
def logger(trt: Any) -> Any:
    """Returns the process's logger; call `clear` before the operation to be checked."""

    class Log(trt.ILogger):  # type: ignore[misc]  # tensorrt is untyped
        """Keeps messages and prints nothing."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.clear()

        def clear(self) -> None:
            self.errors: list[str] = []
            self.skipped: list[str] = []  # of tactics that TensorRT could not use, among several
            self.unused: list[str] = []
            self.layers = ""  # of the compiled engine, one per line (TensorRT-RTX)
            self.scratch_bytes: int | None = None  # activation memory, at most

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.ERROR:
                # TensorRT logs a kernel that it cannot use as an error; another kernel may work.
                skipped = "Skipping tactic" in message
                (self.skipped if skipped else self.errors).append(message)
            if "Unused Input" in message:
                self.unused.append(message)
            if message.startswith("Layers:"):
                self.layers = message
            if found := _SCRATCH.search(message):
                self.scratch_bytes = int(found[1])

        @property
        def reason(self) -> str:
            """The first error since `clear`; later ones are its consequences."""
            return one_line(self.errors[0]) if self.errors else "it does not say why"

        def check(self, who: str) -> None:
            """Raises ExportError if `who` logged an error, or an input that it would not read."""
            if self.unused:
                said = one_line("; ".join(self.unused))
                raise ExportError(f"{who} would drop a part of the graph: {said}")
            if self.errors:
                raise ExportError(f"{who} refuses the graph: {self.reason}")

    return Log()


def one_line(text: str) -> str:
    return " ".join(text.split())
