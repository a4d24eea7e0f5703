"""The shape of the code: which package, folder and file may import which, and what that costs."""

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALLOWED = {
    "octet": {"octet"},
    "calibrate": {"calibrate", "octet"},
    "export": {"export", "octet"},
    "serve": {"serve", "octet"},
    "verify": {"verify", "calibrate", "export", "serve", "octet"},
    "octet_cli": {"octet_cli", "verify", "calibrate", "export", "serve", "octet"},
}
MOST_FILES = 15  # of a folder, beside its `__init__.py`

Graph = Mapping[str, Set[str]]


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_of(path): path for name in ALLOWED for path in sorted((ROOT / name).rglob("*.py"))}


def imported(path: Path) -> Iterator[str]:
    """Yields the modules of ours that a file imports anywhere in it, also for types alone."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in FILES else str(node.module) for name in inside]
        else:
            continue
        yield from (name for name in names if name in FILES)


# `python -m octet` starts the command line; it is the one arrow that points up.
MODULES: Graph = {
    name: set() if name == "octet.__main__" else set(imported(path)) - {name}
    for name, path in FILES.items()
}


def folder_of(module: str) -> str:
    path = FILES[module]
    return module if path.name == "__init__.py" else module.rpartition(".")[0]


def cycle_in(graph: Graph) -> list[str]:
    """Returns the nodes that are left when those that need no other are taken out, one by one."""
    waiting = {name: set(needs) & graph.keys() for name, needs in graph.items()}
    while free := {name for name, needs in waiting.items() if not needs & waiting.keys()}:
        waiting = {name: needs for name, needs in waiting.items() if name not in free}
    return sorted(waiting)


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_only_those_below_it(package: str) -> None:
    mine = [name for name in MODULES if name.partition(".")[0] == package]
    assert mine
    for name in mine:
        ours = {needed.partition(".")[0] for needed in MODULES[name]}
        assert ours <= ALLOWED[package], f"{name} imports {ours - ALLOWED[package]}"


def test_the_readers_and_checks_of_verify_share_no_code_with_the_writers() -> None:
    for name in MODULES:
        # Builds the graph of an engine again with the writer's code, and says so.
        if name.startswith(("verify.reader", "verify.checks")) and name != "verify.checks.engine":
            writers = {needed for needed in MODULES[name] if needed.startswith("export")}
            assert not writers, f"{name} imports {writers}"


def test_no_file_imports_one_that_imports_it() -> None:
    assert cycle_in(MODULES) == []


def test_no_folder_imports_one_that_imports_it() -> None:
    folders: dict[str, set[str]] = {}
    for name, needs in MODULES.items():
        mine = folders.setdefault(folder_of(name), set())
        mine |= {folder_of(needed) for needed in needs} - {folder_of(name)}
    assert cycle_in(folders) == []


def test_a_folder_says_what_it_holds_and_is_small_enough_to_look_through() -> None:
    for folder in {path.parent for path in FILES.values()}:
        said = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
        assert said, f"{folder.relative_to(ROOT)}/__init__.py has no docstring"
        files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(files) <= MOST_FILES, f"{folder.relative_to(ROOT)} has {len(files)} files"


def loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    output = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT
    )
    return set(output.stdout.split())


HEAVY = {"torch", "transformers", "onnx", "onnxruntime", "tensorrt", "fastapi", "vllm"}


@pytest.mark.parametrize("package", ["octet", "octet_cli"])
def test_the_vocabulary_and_the_command_line_load_no_heavy_library(package: str) -> None:
    modules = [name for name in MODULES if name.startswith(f"{package}.") and "__" not in name]
    assert len(modules) > 5
    assert not loaded_by(f"import {', '.join(modules)}") & HEAVY


@pytest.mark.parametrize("module", ["serve.run", "serve.engine.engine"])
def test_serving_does_not_load_torch(module: str) -> None:
    assert not loaded_by(f"import {module}") & {"torch", "transformers"}
