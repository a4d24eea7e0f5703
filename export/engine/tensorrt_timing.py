"""The timing cache: how fast each kernel was, so that the next build need not try them again."""

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

from octet.errors import ExportError

__all__ = ["read_timings", "write_timings"]


def read_timings(trt: Any, config: Any, path: Path) -> None:
    """Gives `config` the cache in `path`, or an empty one if there is no such file.

    Raises ExportError for a file that is not the cache of this release and this GPU.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        content = b""
    except OSError as error:
        raise ExportError(f"timing cache {path}: {error.strerror}") from None
    cache = config.create_timing_cache(content)
    if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
        raise ExportError(
            f"timing cache {path}: not one of TensorRT {trt.__version__} and this GPU;"
            " name another file"
        )


def write_timings(config: Any, path: Path) -> None:
    """Writes the cache beside `path`, and moves it there: two builds may end at once."""
    content = config.get_timing_cache().serialize()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, written = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with open(handle, "wb") as file:
                file.write(content)
            os.chmod(written, 0o644)  # mkstemp's 0600 would outlive the move
            os.replace(written, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(written)
    except OSError as error:
        raise ExportError(f"timing cache {path}: {error.strerror}") from None
