"""Keeps a redacted sample of a model's requests, as JSON lines for the next calibration.

Requests are drawn at random. A thread redacts and appends them, so that no request waits. Processes
may share a file: a line is one write under the file's lock. When the file is full, every second
line is removed and the share is halved, so every request since its beginning had the same
probability to be in it. The last line holds the file's share, which other processes and later
starts take over.
"""

import contextlib
import errno
import itertools
import json
import logging
import os
import queue
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter as Metric

from octet.errors import ConfigError
from octet.storage.files import open_file
from serve.config import CaptureConfig, GatewayConfig

if TYPE_CHECKING:
    import regex

__all__ = ["Capture", "Taken", "problem_with", "redacted", "require_writable"]

MOST_TEXT = 128 * 1024  # characters; on so many, the built-in patterns hold the GIL for 20 ms
REDACT_S = 5.0  # CPU time of the process that the `redact` patterns may take for a request
MOST_ANSWER = 2 * 1024 * 1024  # bytes of an answer as it was sent
MOST_HELD = 64 * 1024 * 1024  # bytes of requests and answers that wait to be written, by model
PAUSE_S = 30.0  # without captures after a failure, such as a full disk
CLOSE_S = 2.0  # limit for writing the rest at the end
_LONGEST = 1_000_000  # bytes of the lines of a request; the smallest file holds them

# Each takes time linear in the text: no two of its repetitions can match the same characters.
_PATTERNS = (
    (r"(?<![\w.+-])[\w.+-]++@[\w-]+(?:\.[\w-]+)+", "[EMAIL]"),
    (
        r"(?<![A-Za-z0-9])(?:sk|pk|rk|ghp|gho|ghu|ghs|github_pat|xox[a-z]|hf|glpat|AKIA)"
        r"[-_]?[A-Za-z0-9_-]{16,}",
        "[KEY]",
    ),
    (r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?!\.?\d)", "[IP]"),
    (
        r"(?<![\w:])(?=[0-9A-Fa-f:]*::|(?:[0-9A-Fa-f]++:){4})"
        r"(?:[0-9A-Fa-f]{1,4}::?){2,7}[0-9A-Fa-f]{1,4}(?![\w:])",
        "[IP]",
    ),
    (  # hex, base64 and UUIDs; a letter and a digit, as paths, names and rules may be long too
        r"(?<![A-Za-z0-9_+/-])(?=[A-Za-z_+/-]*+\d)(?=[\d_+/-]*+[A-Za-z])[A-Za-z0-9_+/-]{32,}={0,2}",
        "[KEY]",
    ),
    (r"\+?\d(?:[ ().-]{0,2}\d){8,}", "[NUMBER]"),
)
_BUILT_IN = tuple((re.compile(pattern), mark) for pattern, mark in _PATTERNS)

_log = logging.getLogger(__name__)

Samples = list[dict[str, Any]]  # each with a text, or with messages


def redacted(value: Any, patterns: "Sequence[regex.Pattern[str]]" = ()) -> Any:
    """Returns JSON `value` with all matches of `patterns` and the built-in ones replaced.

    Raises TimeoutError, which is an OSError, if `patterns` take longer than `REDACT_S`. Meanwhile
    other threads run, as `regex` releases Python's lock; `re`, which has no limit, would hold it.
    """
    until = time.process_time() + REDACT_S  # the clock of regex's `timeout`

    def replaced(text: str) -> str:
        for pattern in patterns:
            left = max(until - time.process_time(), 0.0)  # a negative one would be no limit
            try:
                text = pattern.sub("[REDACTED]", text, timeout=left)
            except TimeoutError:
                raise TimeoutError(
                    errno.ETIMEDOUT,
                    f"redaction took over {REDACT_S:g} s at the pattern {pattern.pattern!r}; write"
                    " it without nested repetition",
                ) from None
        for built_in, mark in _BUILT_IN:
            text = built_in.sub(mark, text)
        return text

    def clean(part: Any) -> Any:
        if isinstance(part, str):
            return replaced(part)
        if isinstance(part, list):
            return [clean(item) for item in part]
        if isinstance(part, dict):
            return {clean(key): clean(item) for key, item in part.items()}
        return part

    return clean(value)


class Capture:
    """The captured requests of one model."""

    def __init__(self, model: str, config: CaptureConfig, metric: Metric) -> None:
        """`metric` counts the requests that were drawn, by model and outcome."""
        self.config = config
        self.share = config.share  # of requests that are drawn now
        self.paused = False  # as the last write failed
        self._failure = ""  # of the last write that failed
        self._failed_at = 0.0  # by the monotonic clock
        self._outcomes: Counter[str] = Counter()  # of requests: "kept", or why not
        self._model = model
        self._metric = metric
        self._limit = config.max_mb * 1_000_000
        self._patterns = _compiled(config.redact)
        self._random = random.Random()
        self._held = 0  # bytes that wait
        # Inode and size of the file that `share` is of; at first only the size is known.
        self._known = (-1, _size_of(config.file))
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        for outcome in ("kept", "failed"):  # Prometheus sees no increase to a counter's first value
            metric.labels(model, outcome)

    def take(self, size: int) -> "Taken | None":
        """Draws whether to capture a request of `size` bytes; returns its capture, or None."""
        share = self.share
        if self._random.random() >= share:
            return None
        if self.resting:
            self.count("failed")
            return None
        taken = Taken(self, share)
        taken.hold(size)
        return taken

    @property
    def resting(self) -> bool:
        """Returns whether the last failure was so recent that nothing is tried."""
        return self.paused and time.monotonic() < self._failed_at + PAUSE_S

    def count(self, outcome: str) -> None:
        with self._lock:
            self._outcomes[outcome] += 1
        self._metric.labels(self._model, outcome).inc()

    def hold(self, size: int) -> bool:
        """Counts `size` bytes as waiting; returns False, and does not, if they are too many."""
        with self._lock:
            if self._held + size > MOST_HELD:
                return False
            self._held += size
            return True

    def free(self, size: int) -> None:
        """Counts `size` bytes as waiting no longer."""
        with self._lock:
            self._held -= size

    def put(self, work: Callable[[], None]) -> None:
        """Does `work` on the thread, after what was put before."""
        if self._thread is None:
            name = f"capture of {self._model}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()
        self._waiting.put(work)

    def _run(self) -> None:
        while (work := self._waiting.get()) is not None:
            work()

    def stop(self) -> threading.Thread | None:
        """Lets the thread end, once it has written what was put; returns it."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._waiting.put(None)
        return thread

    def close(self) -> None:
        """Stops, and waits for the thread, `CLOSE_S` at most."""
        if (thread := self.stop()) is not None:
            thread.join(CLOSE_S)

    def status(self, *, addresses: bool) -> dict[str, Any]:
        """Reports what was captured; reads no file, because a disk may hang."""
        with self._lock:
            dropped = dict(self._outcomes)
        found = {
            "share": self.config.share,
            "share_now": self.share,
            "kept": dropped.pop("kept", 0),
            "dropped": dropped,
            "size_bytes": self._known[1],
            "limit_bytes": self._limit,
            "paused": self.paused,
            "last_failure_s_ago": (
                round(time.monotonic() - self._failed_at, 1) if self._failure else None
            ),
        }
        if addresses:
            found |= {"file": str(self.config.file), "last_failure": self._failure or None}
        return found

    def write(self, samples: Samples, share: float) -> str:
        """Redacts and appends the samples of a request, which was drawn with the chance `share`.

        Returns the outcome. Raises ValueError for a text that is not Unicode.
        """
        if len(json.dumps(samples, ensure_ascii=False)) > MOST_TEXT:
            return "too_long"
        try:
            outcome = self._append(redacted(samples, self._patterns), share)
        except OSError as error:
            self._failed(error)
            return "failed"
        if self.paused:
            _log.info("%s: requests are captured again", self.config.file)
            self.paused = False
        return outcome

    def _failed(self, error: OSError) -> None:
        if not self.paused:
            line = "%s: requests are served but not captured: %s; tried again every %g s"
            _log.warning(line, self.config.file, error.strerror, PAUSE_S)
        self._failure = error.strerror or str(error)
        self._failed_at = time.monotonic()
        self.paused = True

    def _append(self, samples: Samples, share: float) -> str:
        while True:
            with self._opened() as descriptor:
                size = self._whole(descriptor)
                if self._random.random() * share >= self.share:  # it has halved since the draw
                    return "thinned"
                share = self.share
                lines = b"".join(_line(sample, share) for sample in samples)
                if len(lines) > _LONGEST:
                    return "too_long"
                if size + len(lines) <= self._limit:
                    _write(descriptor, lines, size)
                    self._known = os.fstat(descriptor).st_ino, size + len(lines)
                    return "kept"
                self._halve_file()

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        """Opens the file, and holds its lock."""
        import fcntl  # not on Windows

        path = self.config.file
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if _is_at(path, descriptor):
                    yield descriptor
                    return
            finally:
                os.close(descriptor)

    def _whole(self, descriptor: int) -> int:
        """Returns the file's size, without half a line of a process that was killed.

        Takes over the share of a file that another process has written.
        """
        found = os.fstat(descriptor)
        size = found.st_size
        if (found.st_ino, size) == self._known:
            return size
        _beside(self.config.file).unlink(missing_ok=True)  # of a process killed while it thinned
        length = min(size, 2 * _LONGEST)
        tail = os.pread(descriptor, length, size - length)
        lines, _, half = tail.rpartition(b"\n")
        if half:
            size -= len(half)
            os.ftruncate(descriptor, size)
        self.share = min(self.config.share, _share_of(lines.rpartition(b"\n")[2]) if lines else 1.0)
        self._known = found.st_ino, size
        return size

    def _halve_file(self) -> None:
        """Puts a file with every second line in the place of the full one."""
        path = self.config.file
        beside = _beside(path)
        try:
            descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with path.open("rb") as old, open(descriptor, "wb") as new:
                last = b""
                for line in itertools.islice(old, 1, None, 2):
                    new.write(last)
                    last = line
                if last:
                    new.write(_line(json.loads(last), self.share / 2))
            os.replace(beside, path)
        except OSError:
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)
            raise


class Taken:
    """One request that was drawn, and its answer so far."""

    def __init__(self, capture: Capture, share: float) -> None:
        self._capture = capture
        self._share = share
        self._pieces: list[bytes] = []
        self._held = self._answer = 0  # bytes
        self._ended = False

    def add(self, piece: bytes) -> None:
        """Adds a piece of the answer as it was sent."""
        self._answer += len(piece)
        if self._answer > MOST_ANSWER:
            self.drop("too_long")
        elif self.hold(len(piece)):
            self._pieces.append(piece)

    def hold(self, size: int) -> bool:
        if self._ended:
            return False
        if not self._capture.hold(size):
            self.drop("busy")
            return False
        self._held += size
        return True

    def end(self, samples_of: Callable[[bytes], Samples]) -> None:
        """Writes what `samples_of` makes of the whole answer, on the capture's thread.

        It raises an exception for what is no text.
        """
        if self._ended:
            return
        self._ended = True
        self._capture.put(lambda: self._write(samples_of))

    def drop(self, outcome: str) -> None:
        """Forgets the request, unless it has ended."""
        if not self._ended:
            self._ended = True
            self._pieces = []
            self._capture.free(self._held)
            self._capture.count(outcome)

    def _write(self, samples_of: Callable[[bytes], Samples]) -> None:
        try:
            outcome = "failed"  # so that what waited behind a slow pattern takes no such time too
            if not self._capture.resting:
                outcome = self._capture.write(samples_of(b"".join(self._pieces)), self._share)
        except Exception as error:  # clients and backends send anything; their text is not logged
            _log.debug("a request is not captured: %s", type(error).__name__)
            outcome = "unsupported"
        self._pieces = []
        self._capture.free(self._held)
        self._capture.count(outcome)


def problem_with(file: Path) -> str | None:
    """Returns why requests cannot be captured to `file`, or None."""
    directory = file.parent
    if not directory.is_dir():
        return f"{directory}: no such directory; create it"
    if not os.access(directory, os.W_OK | os.X_OK):
        return f"{directory}: not writable for this user; choose another directory"
    try:
        with open_file(file) as opened:
            first = opened.readline(_LONGEST)
        if first:
            _share_of(first)
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{file}: {error.strerror}"
    return None if os.access(file, os.W_OK) else f"{file}: not writable for this user"


def require_writable(config: GatewayConfig) -> None:
    """Raises ConfigError if a model's requests cannot be captured."""
    for name, model in config.models.items():
        if model.capture is not None and (problem := problem_with(model.capture.file)):
            raise ConfigError(f"models.{name}.capture.file: {problem}")


def _share_of(line: bytes) -> float:
    """Returns the share of a captured line. Raises OSError for another line."""
    try:
        share = json.loads(line)["share"]
        if isinstance(share, float) and 0 < share <= 1:
            return share
    except (ValueError, TypeError, LookupError):
        pass
    raise OSError(errno.EINVAL, "it holds other lines than captured requests; name a new file")


def _compiled(patterns: Sequence[str]) -> "list[regex.Pattern[str]]":
    if not patterns:
        return []
    import regex

    return [regex.compile(pattern) for pattern in patterns]


def _size_of(path: Path) -> int:
    """Returns a file's size in bytes; 0 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def _is_at(path: Path, descriptor: int) -> bool:
    """Decides whether the open file still is the one at `path`."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _line(sample: dict[str, Any], share: float) -> bytes:
    return json.dumps(sample | {"share": share}, ensure_ascii=False).encode() + b"\n"


def _write(descriptor: int, lines: bytes, size: int) -> None:
    """Appends all of `lines` to a file of `size` bytes; if that fails, none of them."""
    try:
        if os.write(descriptor, lines) < len(lines):  # the disk became full on the way
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        with contextlib.suppress(OSError):  # what stays of a line is cut off by the next write
            os.ftruncate(descriptor, size)
        raise
