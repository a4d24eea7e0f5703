"""Shares what takes long to make between tests, between their processes, and with later runs.

Each thing is a directory in pytest's cache (`.pytest_cache/d/octet`). Its name is a hash of all
that decides its content: the code of this repository, the versions of the packages that compute
it, how this CPU computes, and what the test gives. So a test never gets what another version of
the code has made. What nobody has used for a week is removed. No test writes into such a
directory: one that damages something damages a copy.
"""

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import IO, Any

from octet.artifacts.manifest import software

__all__ = ["Shared"]

ROOT = Path(__file__).parent.parent
_CODE = ("octet", "calibrate", "export", "serve", "verify", "octet_cli", "tests")
_PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "numba", "onnx", "onnxruntime")
_KEPT_S = 7 * 24 * 3600


class Shared:
    """Directories in `root`, or `elsewhere` if that cannot be written."""

    def __init__(self, root: Path, elsewhere: Path) -> None:
        self._root = root
        self._elsewhere = elsewhere

    def directory(self, name: str, build: Callable[[Path], object], **facts: Any) -> Path:
        """Returns the directory that `build(path)` has made; the first who asks makes it.

        `facts` say what it is made of, apart from the code: anything that JSON can hold.
        """
        content = json.dumps([name, facts, _code(), software(*_PACKAGES), _arithmetic()])
        name = f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"
        try:
            lock = self._open_lock(name)
        except OSError:
            self._root = self._elsewhere
            lock = self._open_lock(name)
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            path = self._root / name
            if path.is_dir():
                os.utime(path)
            else:
                partial = self._root / f"{name}.partial"
                shutil.rmtree(partial, ignore_errors=True)
                build(partial)
                os.replace(partial, path)
                _remove_old(self._root)
        return path

    def _open_lock(self, name: str) -> IO[str]:
        self._root.mkdir(parents=True, exist_ok=True)
        return (self._root / f"{name}.lock").open("w")


def _remove_old(root: Path) -> None:
    for path in root.iterdir():
        if time.time() - path.stat().st_mtime > _KEPT_S:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@cache
def _code() -> str:
    digest = hashlib.sha256()
    for package in _CODE:
        for path in sorted((ROOT / package).rglob("*.py")):
            digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()


@cache
def _arithmetic() -> dict[str, Any]:
    import torch

    from calibrate.journal.identity import arithmetic_of

    return arithmetic_of(torch.device("cpu"))
