"""Reads the shape of the code: its folders, its files, and which imports which.

`python tests/layout.py` prints the files and lines of each folder, and the folders it imports.
"""

import ast
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from statistics import median

__all__ = ["ALLOWED", "FILES", "FOLDERS", "MODULES", "ROOT", "cycle_in"]

ROOT = Path(__file__).parent.parent
ALLOWED = {
    "octet": {"octet"},
    "calibrate": {"calibrate", "octet"},
    "export": {"export", "octet"},
    "serve": {"serve", "octet"},
    "verify": {"verify", "calibrate", "export", "serve", "octet"},
    "octet_cli": {"octet_cli", "verify", "calibrate", "export", "serve", "octet"},
}

Graph = Mapping[str, Set[str]]


def module_of(path: Path) -> str:
    """Returns the dotted name of a file; that of its folder for `__init__.py`."""
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


def folders() -> Graph:
    """Returns the folders that each folder imports."""
    found: dict[str, set[str]] = {}
    for name, needs in MODULES.items():
        mine = found.setdefault(folder_of(name), set())
        mine |= {folder_of(needed) for needed in needs} - {folder_of(name)}
    return found


FOLDERS = folders()


def main() -> None:
    lines = {name: len(path.read_text().splitlines()) for name, path in FILES.items()}
    for folder, needs in sorted(FOLDERS.items()):
        mine = [name for name in FILES if folder_of(name) == folder and name != folder]
        total = sum(lines[name] for name in mine)
        print(f"{folder:28} {len(mine):3} files {total:6,} lines  {', '.join(sorted(needs))}")
    sizes = [lines[name] for name, path in FILES.items() if path.name != "__init__.py"]
    short = sum(size < 40 for size in sizes)
    print(
        f"{len(sizes)} files, {sum(lines.values()):,} lines, median {median(sizes):.0f},"
        f" {short} under 40; in cycles: {len(cycle_in(MODULES))} files,"
        f" {len(cycle_in(FOLDERS))} folders"
    )


if __name__ == "__main__":
    main()
