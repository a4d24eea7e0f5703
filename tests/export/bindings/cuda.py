"""Lists what source files use of cuda-bindings, and which of its releases have that.

    python -m tests.export.bindings.cuda

writes cuda.txt: of all that is used, the name, the parameters, and the releases. The modules are
called `runtime`, `driver` and `nvrtc` where they are used.
"""

import ast
import importlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from functools import reduce
from pathlib import Path

__all__ = ["CUDA", "FILES", "LISTED", "MODULES", "used", "used_by_all"]

ROOT = Path(__file__).parents[3]
FILES = [
    *sorted((ROOT / "serve" / "tensorrt").glob("*.py")),
    ROOT / "octet/hardware/nvrtc.py",
    ROOT / "calibrate/observe/cuda_kernels.py",
]
CUDA = Path(__file__).parent / "cuda.txt"
LISTED = {"a": "12.9.10", "b": "13.5.0"}
MODULES = ("driver", "nvrtc", "runtime")
_PREFIXES = {"driver": ("cu", "CU"), "nvrtc": ("nvrtc",), "runtime": ("cuda",)}


def used(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name), such as ("runtime", "cudaMemcpyKind.cudaMemcpyHostToDevice").

    Enumerations may have been given a name of their own in between, such as `attribute`.
    """
    tree = ast.parse(path.read_text())
    aliases = {
        target.id: _path(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        parts = _path(node)
        if parts and parts[0] in aliases:
            parts = [*aliases[parts[0]], *parts[1:]]
        for module in MODULES:
            at = next((i for i, part in enumerate(parts) if part.lstrip("_") == module), None)
            if at is None or at + 1 == len(parts):
                continue
            inner = [part for part in parts[at + 1 :] if part.startswith(_PREFIXES[module])]
            inner += [part for part in parts[at + 1 :] if part.startswith("NVRTC_")]
            if inner:
                yield module, ".".join(inner)


def _path(node: ast.expr) -> list[str]:
    """["self", "runtime", "cudaMalloc"] of self.runtime.cudaMalloc; [] of anything else."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (inner := _path(node.value)):
        return [*inner, node.attr]
    return []


def used_by_all() -> list[str]:
    """Such as "runtime.cudaMalloc"."""
    return sorted({f"{module}.{name}" for path in FILES for module, name in used(path)})


def main() -> None:
    found: dict[str, str] = {}
    for letter, version in LISTED.items():
        with tempfile.TemporaryDirectory() as directory:
            wheel = f"cuda-bindings=={version}"
            pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", directory]
            subprocess.run([*pip, wheel], check=True)
            with zipfile.ZipFile(next(Path(directory).glob("*.whl"))) as archive:
                archive.extractall(directory)
            ask = [sys.executable, "-m", __spec__.name, "ask"]
            path = {"PYTHONPATH": os.pathsep.join([directory, str(ROOT)])}
            asked = subprocess.run(
                ask, check=True, env=os.environ | path, stdout=subprocess.PIPE, text=True
            )
        for line in json.loads(asked.stdout):
            found[line] = found.get(line, "") + letter
    head = [f"# {letter} = cuda-bindings {version}" for letter, version in LISTED.items()]
    body = [f"{letters:<{len(LISTED)}} {line}" for line, letters in sorted(found.items())]
    CUDA.write_text("\n".join([*head, *body]) + "\n")
    print(f"{CUDA}: {len(body)} names")


def existing() -> Iterator[str]:
    """Of what is used, that which the installed cuda-bindings have, with parameters."""
    for name in used_by_all():
        module, *rest = name.split(".")
        try:
            value = reduce(getattr, rest, importlib.import_module(f"cuda.bindings.{module}"))
        except AttributeError:
            continue
        line = (getattr(value, "__doc__", None) or "").partition("\n")[0]
        called = rest[-1] + "(" in line and callable(value)
        yield f"{module}.{line}" if called else name


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        json.dump(sorted(existing()), sys.stdout)
