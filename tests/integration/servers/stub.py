"""Triton's Python backend from a wheel: the server, and an interpreter for its stub process.

The stub is a program that embeds libpython3.X, X being 3.11 or 3.12 (numpy 1.26 has no wheels for
3.13). It ignores PYTHONPATH, and takes its standard library and packages from the pyvenv.cfg beside
the first `python3` on PATH. `place_stub` writes such a pair: `home` is the installation that the
libpython belongs to, so that library and standard library are of one build, and `lib` is the
virtual environment's, so that its packages are found.
"""

import ctypes
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from layout import (
    TRITON,
    TRITON_BACKENDS,
    TRITON_BINARY,
    TRITON_PYTHON_LIBRARY,
    TRITON_SERVER,
    TRITON_STUB_HOME,
    TRITON_STUBS,
    python,
)

VERSIONS = ("3.11", "3.12")
QUESTION = (
    "import sys, sysconfig; v = sysconfig.get_config_var; "
    "print('%d.%d' % sys.version_info[:2], sys.base_prefix, v('LIBDIR'), sep='\\n')"
)


class StubError(Exception):
    """Why Triton's Python backend cannot run here, in one line."""


def find_interpreter() -> str:
    """The interpreter that runs this script if the stub can be of its version, else one on PATH."""
    if "{}.{}".format(*sys.version_info[:2]) in VERSIONS:
        return sys.executable
    for version in VERSIONS:
        interpreter = shutil.which(f"python{version}")
        if interpreter is not None and ask(interpreter)[:1] == [version]:
            return interpreter
    raise StubError(f"Triton's Python models need Python {' or '.join(VERSIONS)} on PATH")


def ask(interpreter: str) -> list[str]:
    """Version (X.Y), installation prefix and library directory; empty if it does not run."""
    answer = subprocess.run([interpreter, "-c", QUESTION], capture_output=True, text=True)
    return answer.stdout.splitlines()


def unpack_server() -> None:
    """Unpack the server and its libraries from the downloaded wheel, and delete the wheel."""
    (wheel,) = TRITON_SERVER.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(("pytriton/tritonserver/", "nvidia_pytriton.libs/")):
                archive.extract(name, TRITON_SERVER)
    wheel.unlink()
    TRITON_BINARY.chmod(0o755)


def place_stub(interpreter: str) -> None:
    """Put the stub of the interpreter's version beside the backend, with a home to start from."""
    version, prefix, library_directory = ask(interpreter)
    program = TRITON_BACKENDS / "python" / "triton_python_backend_stub"
    shutil.copy(TRITON_STUBS / version / program.name, program)
    program.chmod(0o755)

    home = find_library(version, Path(prefix), Path(library_directory))
    (TRITON_STUB_HOME / "bin").mkdir(parents=True)
    (TRITON_STUB_HOME / "lib").symlink_to(TRITON / "lib")
    own = home / f"python{version}"
    (TRITON_STUB_HOME / "bin" / "python3").symlink_to(own if own.exists() else python(TRITON))
    (TRITON_STUB_HOME / "pyvenv.cfg").write_text(
        f"home = {home}\ninclude-system-site-packages = false\nversion = {version}\n"
    )


def find_library(version: str, prefix: Path, library_directory: Path) -> Path:
    """Make libpython of `version` loadable; returns its installation's `bin` directory."""
    name = f"libpython{version}.so.1.0"
    TRITON_PYTHON_LIBRARY.mkdir()
    if (library_directory / name).is_file():
        (TRITON_PYTHON_LIBRARY / name).symlink_to(library_directory / name)
        return prefix / "bin"
    if not is_loadable(name) and shutil.which("apt-get") and os.geteuid() == 0:
        for command in (["update"], ["install", "--yes", f"libpython{version}"]):
            subprocess.run(["apt-get", "--quiet", *command], stdout=subprocess.DEVNULL)
    if not is_loadable(name):
        raise StubError(
            f"Triton's Python backend needs {name}, which is not on this machine: "
            f"install it (Debian and Ubuntu: apt-get install libpython{version}) and run this again"
        )
    return Path("/usr/bin")


def is_loadable(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True
