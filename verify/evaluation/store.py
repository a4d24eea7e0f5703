"""Stores answers in a file on arrival, so that an interrupted evaluation can be resumed.

The file has JSON lines: a header (target, identity, k), then one line per sample, found by the hash
of its tokens. Every line is on disk before the next is begun. A line cut off at the end is dropped,
and its sample is sent again. Each answer has a checksum: it is read back as it was written, or not
at all, so a resumed evaluation gives the same figures.
"""

import base64
import fcntl
import hashlib
import json
import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octet.errors import ArtifactError, ConfigError
from verify.evaluation.target import Answer

__all__ = ["AnswerStore"]

_SCHEMA = 2  # 1 had no checksums


class AnswerStore:
    """The answers of one target at one k; only in memory if there is no directory."""

    def __init__(
        self, directory: Path | None, name: str, identity: Mapping[str, str], k: int
    ) -> None:
        """Reads the stored answers.

        Raises ArtifactError for a file that is damaged before its end, ConfigError for a file that
        another process is writing.
        """
        self.name, self.k = name, k
        self._head: dict[str, Any] = {
            "schema_version": _SCHEMA,
            "name": name,
            "identity": dict(identity),
            "k": k,
        }
        self._answers: dict[str, Answer] = {}
        self._samples: dict[str, str] = {}  # path -> SHA-256 when they were last sent
        self.path: Path | None = None
        self.changed: str | None = None  # the first difference from an earlier file of this name
        if directory is None:
            return
        directory.mkdir(parents=True, exist_ok=True)
        line = json.dumps(self._head, sort_keys=True)
        slug = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[-60:]
        self.path = directory / f"{slug}-{hashlib.sha256(line.encode()).hexdigest()[:12]}.jsonl"
        if not self.path.exists():
            self.changed = _change(directory, self._head)
        self._file = self.path.open("ab")
        try:
            self._lock()
            if not self._read(self.path, line):
                self._append(line)
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        """Locks the file until it is closed or this process ends, however that happens."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{self.path}: another evaluation is writing it; wait for it, or give another --out"
            ) from None

    def get(self, digest: str) -> Answer | None:
        return self._answers.get(digest)

    def samples(self, path: str, sha256: str) -> str | None:
        """Records the samples that are sent.

        Returns the SHA-256 that they had before, if they have changed.
        """
        before = self._samples.get(path)
        if before == sha256:
            return None
        self._samples[path] = sha256
        if self.path is not None:
            self._append(_sealed({"samples": path, "sha256": sha256}))
        return before

    def add(self, digest: str, answer: Answer) -> None:
        """Stores an answer; it is on disk when this returns."""
        self._answers[digest] = answer
        if self.path is None:
            return
        fields = {
            "sample": digest,
            "tokens": len(answer.logprobs),
            "logprobs": _text(answer.logprobs),
            "top_ids": _text(answer.top_ids),
            "top_logprobs": _text(answer.top_logprobs),
        }
        self._append(_sealed(fields))

    def close(self) -> None:
        if self.path is not None:
            self._file.close()

    def _append(self, line: str) -> None:
        self._file.write(line.encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _read(self, path: Path, head: str) -> bool:
        """Reads all lines and removes one cut off at the end; returns False if none is left."""
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(path, whole)
        first, *lines = content[:whole].split(b"\n")
        if whole and first != head.encode():
            raise ArtifactError(f"{path}, line 1: damaged since it was written; delete the file")
        for number, line in enumerate(lines[:-1], start=2):
            try:
                fields = _unsealed(line)
                if "samples" in fields:
                    self._samples[fields["samples"]] = fields["sha256"]
                    continue
                self._answers[fields["sample"]] = _answer(fields, self.k)
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ArtifactError(
                    f"{path}, line {number}: damaged since it was written; delete the line, and the"
                    " sample is sent again"
                ) from None
        return whole > 0


def _change(directory: Path, head: Mapping[str, Any]) -> str | None:
    """Returns the first difference from the newest file of the same name and k, if any."""
    for path in sorted(directory.glob("*.jsonl"), key=lambda path: -path.stat().st_mtime):
        with path.open("rb") as file:
            try:
                before = json.loads(file.readline())
                if (before["name"], before["k"]) != (head["name"], head["k"]):
                    continue
                old, new = (
                    x["identity"] | {"format of its answers": str(x["schema_version"])}
                    for x in (before, head)
                )
            except (ValueError, KeyError, TypeError):
                continue
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) != new.get(key):
                return f"{key} was {_short(old.get(key))}, is {_short(new.get(key))}"
    return None


def _short(value: str | None) -> str:
    return "absent" if value is None else value if len(value) <= 40 else f"{value[:12]}..."


def _sealed(fields: Mapping[str, Any]) -> str:
    """Serializes `fields` as a line with a checksum."""
    return json.dumps({**fields, "crc32": zlib.crc32(json.dumps(fields).encode())})


def _unsealed(line: bytes) -> dict[str, Any]:
    """Parses a line; ValueError, KeyError or AttributeError if it is damaged."""
    fields: dict[str, Any] = json.loads(line)
    crc32 = fields.pop("crc32")
    if zlib.crc32(json.dumps(fields).encode()) != crc32:
        raise ValueError("its checksum differs")
    return fields


def _text(array: NDArray[Any]) -> str:
    return base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode()


def _answer(fields: Mapping[str, Any], k: int) -> Answer:
    tokens = fields["tokens"]

    def array(name: str, dtype: str) -> NDArray[Any]:
        return np.frombuffer(base64.b64decode(fields[name], validate=True), dtype)

    return Answer(
        array("logprobs", "<f4").reshape(tokens),
        array("top_ids", "<i4").reshape(tokens, k),
        array("top_logprobs", "<f4").reshape(tokens, k),
    )
