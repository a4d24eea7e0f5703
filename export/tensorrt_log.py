"""What TensorRT says while it parses and builds: errors, warnings that are errors, and layers."""

import re
from typing import Any

from octet.errors import ExportError

__all__ = ["logger", "one_line"]

_LOGGERS: dict[str, Any] = {}
_SCRATCH = re.compile(r"Total Activation Memory: (\d+) bytes")


def logger(trt: Any) -> Any:
    """The one logger of the process: TensorRT ignores a second one, with a warning."""
    if trt.__name__ not in _LOGGERS:

        class Log(trt.ILogger):  # type: ignore[misc]
            """Keeps what was said; nothing is printed."""

            def __init__(self) -> None:
                trt.ILogger.__init__(self)
                self.clear()

            def clear(self) -> None:
                self.errors: list[str] = []
                self.skipped: list[str] = []  # of one way to compute something, of several
                self.unused: list[str] = []
                self.layers = ""  # of the compiled engine, one a line (TensorRT-RTX)
                self.scratch_bytes: int | None = None  # memory for what is computed, at most

            def log(self, severity: Any, message: str) -> None:
                if severity <= trt.ILogger.ERROR:
                    # TensorRT calls a kernel that it cannot use an error; others may do.
                    skipped = "Skipping tactic" in message
                    (self.skipped if skipped else self.errors).append(message)
                if "Unused Input" in message:
                    self.unused.append(message)
                if message.startswith("Layers:"):
                    self.layers = message
                if found := _SCRATCH.search(message):
                    self.scratch_bytes = int(found[1])

            def check(self, who: str) -> None:
                """Raises ExportError for an error of `who`, or an input that it would not read."""
                if self.unused:
                    said = one_line("; ".join(self.unused))
                    raise ExportError(f"{who} would drop a part of the graph: {said}")
                if self.errors:
                    # What follows the first is its consequence, or that no GPU is here.
                    raise ExportError(f"{who} refuses the graph: {one_line(self.errors[0])}")

        _LOGGERS[trt.__name__] = Log()
    return _LOGGERS[trt.__name__]


def one_line(text: str) -> str:
    return " ".join(text.split())
