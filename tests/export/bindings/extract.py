"""Writes signatures.txt: the names and signatures of TensorRT's Python API, by version.

    python -m tests.export.bindings.extract

The bindings' wheels install alone, without TensorRT: they need nine C functions of its libraries,
which are called only once a builder or a runtime is made. Libraries that define those and do
nothing, compiled here with `cc`, let the extension be imported on any Linux machine and asked for
its docstrings, where pybind11 keeps every signature.
"""

import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.export.bindings import LISTED, SIGNATURES

STUBS = """
void *createInferBuilder_INTERNAL(void) { return 0; }
void *createInferRefitter_INTERNAL(void) { return 0; }
void *createInferRuntime_INTERNAL(void) { return 0; }
void *createNvOnnxParser_INTERNAL(void) { return 0; }
void *createNvOnnxParserRefitter_INTERNAL(void) { return 0; }
int getNvOnnxParserVersion(void) { return 0; }
void *getBuilderPluginRegistry(void) { return 0; }
void *getPluginRegistry(void) { return 0; }
int initLibNvInferPlugins(void) { return 1; }
"""
# Plugins written in Python, and what TensorRT 11 removed whole: Octet has neither.
LEFT_OUT = re.compile("Plugin|^IAlgorithm|Calibrat|^Lean|^DimsExprs|^IDimension")


def main() -> None:
    found: dict[str, str] = {}  # a line -> the letters of the versions that have it
    for letter, (package, version) in LISTED.items():
        for line in signatures(package, version):
            found[line] = found.get(line, "") + letter
    width = len(LISTED)
    head = [f"# {letter} = {package} {version}" for letter, (package, version) in LISTED.items()]
    body = [f"{letters:<{width}} {line}" for line, letters in sorted(found.items())]
    SIGNATURES.write_text("\n".join([*head, *body]) + "\n")
    print(f"{SIGNATURES}: {len(body)} signatures of {width} versions")


def signatures(package: str, version: str) -> list[str]:
    """What `package` has, asked in a process of its own: two versions do not fit in one."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        wheel = f"{package}=={version}"
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", directory, wheel]
        subprocess.run(pip, check=True)
        with zipfile.ZipFile(next(directory.glob("*.whl"))) as archive:
            archive.extractall(directory)
        extension = next(directory.glob("*/*.so"))
        (directory / "stubs.c").write_text(STUBS)
        compile_ = ["cc", "-w", "-shared", "-fPIC", directory / "stubs.c", "-o"]
        dynamic = subprocess.run(
            ["readelf", "-d", extension], check=True, capture_output=True, text=True
        )
        for library in re.findall(r"\[(lib(?:nv|tensorrt)[^\]]+)\]", dynamic.stdout):
            subprocess.run([*compile_, directory / library], check=True)
        paths = {"LD_LIBRARY_PATH": name, "PYTHONPATH": os.pathsep.join([name, os.getcwd()])}
        ask = [sys.executable, "-m", __spec__.name, extension.parent.name]
        asked = subprocess.run(
            ask, check=True, env=os.environ | paths, stdout=subprocess.PIPE, text=True
        )
        lines: list[str] = json.loads(asked.stdout)
        return lines


def of_module(module: Any) -> Iterator[str]:
    """The lines of everything public in `module`, names without their module."""
    for name, value in vars(module).items():
        if name.startswith("_") or inspect.ismodule(value) or LEFT_OUT.search(name):
            continue
        if not inspect.isclass(value):
            yield from (f"{name}{rest}" for rest in of_callable(value)) if callable(value) else ()
            continue
        yield from of_class(name, value)


def of_class(name: str, value: Any) -> Iterator[str]:
    bases = [base.__name__ for base in value.__bases__ if base.__module__ == value.__module__]
    yield f"class {name}({', '.join(bases)})"
    members = getattr(value, "__members__", {})
    for member, item in vars(value).items():
        if hasattr(type(item), "__members__"):  # also those that a class repeats of its enum
            yield f"{name}.{member} = {type(item).__name__}"
        elif inspect.isclass(item) and not members:
            yield from of_class(f"{name}.{member}", item)
        elif not members and (member == "__init__" or not member.startswith("_")):
            yield from (f"{name}.{member}{rest}" for rest in of_member(item))


def of_member(item: Any) -> Iterator[str]:
    if isinstance(item, property):
        getter = (item.fget.__doc__ or "").partition("\n")[0]
        kind = getter.partition("->")[2].strip() or "object"
        yield f": {kind}" + (" (writable)" if item.fset else "")
    elif callable(item):
        yield from of_callable(item)


def of_callable(item: Any) -> Iterator[str]:
    """`(parameters) -> result` of each overload; nothing of a default object's constructor."""
    lines = (item.__doc__ or "").splitlines()
    if lines and "Overloaded function" in "".join(lines[:3]):
        lines = [line.partition(". ")[2] for line in lines if re.match(r"\d+\. \w+\(", line)]
    else:
        lines = lines[:1]
    for line in lines:
        if match := re.match(r"\w+(\(.*\) -> .*)", line):
            yield match[1]


def plain(line: str) -> str:
    """Without the names of modules, and with the types that a caller gives."""
    line = re.sub(r"\b(?:[a-z]\w*\.)+(?=[A-Z])", "", line)  # typing., tensorrt_bindings.tensorrt.
    line = re.sub(r"\bSupports(Int|Float)\b", lambda match: match[1].lower(), line)
    line = re.sub(r"\b(?:nvinfer1|nvonnxparser)::(?:v_\d_\d::)?", "", line)
    line = line.replace("IParserError", "ParserError")  # its name in C++
    return re.sub(r"<([\w.]+): -?\d+>", r"\1", line)  # <EngineStat.TOTAL_WEIGHTS_SIZE: 0>


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        import importlib

        asked = importlib.import_module(sys.argv[1])
        json.dump(sorted({plain(line) for line in of_module(asked)}), sys.stdout)
