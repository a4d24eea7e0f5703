"""The distribution: its name, its version, and what its messages tell users to install."""

import importlib
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from octet import __version__
from octet_cli.main import _EXTRA_OF
from octet_cli.packages import DISTRIBUTION, PACKAGES
from tests.layout import ROOT

PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT: dict[str, Any] = PYPROJECT["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
PYPI_NAMES = {"cuda": "cuda-bindings", "modelopt": "nvidia-modelopt"}


def texts() -> list[Path]:
    """Sources and documents that could name an extra."""
    folders = [*PACKAGES, "benchmarks", "deploy", "docs", "examples", "tests", "triton_models"]
    found = [path for name in folders for path in (ROOT / name).rglob("*") if path.is_file()]
    kept = [path for path in found if path.suffix in {".md", ".py", ".txt", ".yaml", ".yml", ""}]
    return [*kept, *ROOT.glob("*.md"), ROOT / "pyproject.toml"]


def test_the_version_is_the_same_everywhere() -> None:
    released = re.findall(r"^## \[(\d.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert PROJECT["version"] == __version__ == released[0]


def test_every_extra_that_is_recommended_exists() -> None:
    """PyPI's `octet` is another project: an extra of it would replace this one."""
    named = set()
    for path in texts():
        text = path.read_text(errors="replace").replace("\\", "")
        assert not re.search(r"(?<![\w.-])octet\[[a-z]", text), path
        for extras in re.findall(rf"{DISTRIBUTION}\[([a-z,-]+)\]", text):
            named |= set(extras.split(","))
    assert named >= {"calibrate", "serve", "gpu"}
    assert named <= EXTRAS.keys()
    assert PROJECT["name"] == DISTRIBUTION


@pytest.mark.parametrize("package", _EXTRA_OF)
def test_the_extra_named_for_a_missing_package_installs_it(package: str) -> None:
    wanted = PYPI_NAMES.get(package, package).replace("_", "-")
    names = [re.split(r"[\[<>=~]", item)[0] for item in EXTRAS[_EXTRA_OF[package]]]
    assert wanted in names


def test_commands_and_packages_are_in_the_distribution() -> None:
    for target in PROJECT["scripts"].values():
        module, _, name = target.partition(":")
        assert callable(getattr(importlib.import_module(module), name))
    included = PYPROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {pattern.removesuffix(".*") for pattern in included} == set(PACKAGES)


def test_what_the_source_distribution_adds_exists() -> None:
    lines = (ROOT / "MANIFEST.in").read_text().splitlines()
    named = [line.split() for line in lines if line.startswith(("graft ", "include "))]
    assert len(named) > 5
    for _, *paths in named:
        assert [path for path in paths if not (ROOT / path).exists()] == []
