"""The shape of the code: which package, folder and file may import which, and what that costs."""

import ast
import subprocess
import sys

import pytest

from tests.layout import ALLOWED, FILES, FOLDERS, MODULES, ROOT, cycle_in

MOST_FILES = 15  # of a folder, beside its `__init__.py`
MOST_COMMANDS = 20  # the same of `octet_cli`, which has a file for each command


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
    assert cycle_in(FOLDERS) == []


def test_a_folder_says_what_it_holds_and_is_small_enough_to_look_through() -> None:
    for folder in {path.parent for path in FILES.values()}:
        said = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
        assert said, f"{folder.relative_to(ROOT)}/__init__.py has no docstring"
        files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        most = MOST_COMMANDS if folder == ROOT / "octet_cli" else MOST_FILES
        assert len(files) <= most, f"{folder.relative_to(ROOT)} has {len(files)} files"


def test_text_is_read_and_written_as_utf_8_in_every_locale() -> None:
    for name, path in FILES.items():
        for call in ast.walk(ast.parse(path.read_text("utf-8"))):
            method = getattr(getattr(call, "func", None), "attr", None)
            if isinstance(call, ast.Call) and method in ("read_text", "write_text"):
                given = [*call.args[method == "write_text" :], *(k.arg for k in call.keywords)]
                assert given, f"{name}, line {call.lineno}: {method} without an encoding"


def test_benchmarks_import_what_is_there() -> None:
    """Most need a GPU or a server, so that no test runs them."""
    for path in (ROOT / "benchmarks").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module in MODULES:
                names = defined_in(ast.parse(FILES[node.module].read_text("utf-8")))
                for alias in node.names:
                    there = alias.name in names or f"{node.module}.{alias.name}" in MODULES
                    assert there, f"{path.name}: {node.module} has no {alias.name}"
            elif isinstance(node, ast.ImportFrom) and node.module:
                package = node.module.partition(".")[0]
                assert package not in ALLOWED, f"{path.name}: there is no {node.module}"


def defined_in(tree: ast.Module) -> set[str]:
    """The names that a module has: what it defines, assigns or imports."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
    return names


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
