"""The shape of the code: who may import whom, and what importing the vocabulary costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALLOWED = {
    "octet": {"octet"},
    "calibrate": {"calibrate", "octet"},
    "export": {"export", "octet"},
    "serve": {"serve", "octet"},
}


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize("package", ALLOWED)
def test_a_stage_imports_only_the_vocabulary(package: str) -> None:
    files = [path for path in (ROOT / package).rglob("*.py") if "commands" not in path.parts]
    assert files, package
    for path in files:
        ours = imports(path) & ALLOWED.keys()
        assert ours <= ALLOWED[package], f"{path.relative_to(ROOT)} imports {ours}"


def imported_modules(path: Path, package: str) -> list[str]:
    """Modules of `package` that a file imports anywhere in it, also for types alone."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if hasattr(node, "module")]
    names = [str(node.module) for node in nodes]
    return [name.partition(".")[2] for name in names if name.startswith(f"{package}.")]


@pytest.mark.parametrize("package", ["calibrate", "export"])
def test_no_module_imports_one_that_imports_it(package: str) -> None:
    waiting = {
        path.stem: set(imported_modules(path, package)) for path in (ROOT / package).glob("*.py")
    }
    while free := {name for name, needs in waiting.items() if not needs & waiting.keys()}:
        waiting = {name: needs for name, needs in waiting.items() if name not in free}
    assert not waiting, f"a cycle among {sorted(waiting)}"


def loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    output = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT
    )
    return set(output.stdout.split())


HEAVY = {"torch", "transformers", "onnx", "onnxruntime", "tensorrt", "fastapi", "vllm"}


def test_the_vocabulary_and_the_command_line_load_no_heavy_library() -> None:
    modules = [path.stem for path in (ROOT / "octet").glob("[!_]*.py")]
    statement = "import " + ", ".join(f"octet.{name}" for name in modules)
    assert not loaded_by(statement) & HEAVY


@pytest.mark.parametrize("module", ["serve.run", "serve.engine.engine"])
def test_serving_does_not_load_torch(module: str) -> None:
    assert not loaded_by(f"import {module}") & {"torch", "transformers"}
