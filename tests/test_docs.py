"""Checks the documents: options, links, extras and configuration blocks in them exist.

tests/integration/test_documents.py runs their commands.
"""

import json
import re
import tomllib
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
import yaml

from octet.recipe import Recipe
from octet_cli.main import app
from serve.config.checks import load_config
from serve.config.gateway import Limits
from serve.config.pools import Admission, Timeouts
from tests.documents import LANGUAGES, PAGES, Block, blocks_of, words_of
from tests.layout import FILES, ROOT

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
INLINE = re.compile(r"`((?:octet|calibrate|build-engine) [^`\n]+)`")
EXTRAS = re.compile(r"(?:octet-llm|'\.)\[([\w,-]+)\]")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


def check_yaml(path: Path) -> None:
    """Loads a recipe or a gateway's file as Octet does."""
    found = yaml.safe_load(path.read_text())
    if "weights" in found:
        Recipe.load(str(path.rename(path.with_suffix(".yaml"))))
    elif isinstance(found, dict):
        load_config(path)


CHECKS: dict[str, Callable[[Path], object]] = {
    "yaml": check_yaml,
    "json": lambda path: json.loads(path.read_text()),
    "python": lambda path: compile(path.read_text(), path, "exec"),
}


def commands_of(page: Path) -> list[list[str]]:
    """Returns the words of each of our commands in a page: in blocks, in outputs and in prose."""
    lines = [line for block in blocks_of(page) for line in block.commands()]
    lines = [line.removeprefix("$ ") for line in lines] + INLINE.findall(page.read_text())
    return [
        words
        for line in lines
        if re.match(r"(octet|calibrate|build-engine) ", line)
        if (words := words_of(line))
    ]


def options_of(words: list[str]) -> tuple[set[str], list[str]]:
    """Returns the options of the command that `words` call, and the words after its name."""
    command: Any = typer.main.get_command(app)
    while getattr(command, "commands", None) and words and not words[0].startswith("-"):
        command = command.commands[words[0]]
        words = words[1:]
    names = {"--help", "--version"}
    for parameter in command.params:
        names |= {*parameter.opts, *parameter.secondary_opts}
    return names, words


@pages
def test_every_command_and_option_in_a_page_exists(page: Path) -> None:
    for words in commands_of(page):
        names, rest = options_of(words)
        unknown = [x for x in rest if re.match("--?[a-z]", x) and x.split("=")[0] not in names]
        assert not unknown, f"{' '.join(words)}: no option {unknown}"


def test_commands_are_found() -> None:
    assert len([x for page in PAGES for x in commands_of(page)]) > 60


@pages
def test_every_block_names_its_language(page: Path) -> None:
    text = page.read_text()
    assert len(re.findall("^ *```", text, re.MULTILINE)) == 2 * len(blocks_of(page))
    for block in blocks_of(page):
        assert block.language in LANGUAGES, f"{block.place}: {block.language or 'no language'}"


@pages
def test_every_comment_that_keeps_a_block_from_running_is_before_a_block(page: Path) -> None:
    assert page.read_text().count("<!-- not run:") == sum(bool(b.reason) for b in blocks_of(page))


@pytest.mark.parametrize(
    "block", [one for one in BLOCKS if one.language in CHECKS], ids=lambda block: block.place
)
def test_code_in_a_page_is_valid(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_KEY", "a key of vLLM")
    path = tmp_path / "block"
    path.write_text(block.text)
    CHECKS[block.language](path)


@pages
def test_every_extra_in_a_page_exists(page: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for names in EXTRAS.findall(page.read_text()):
        assert set(names.split(",")) <= set(project["optional-dependencies"]), names


@pages
def test_every_link_to_a_file_leads_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        if not target.startswith(("http", "mailto:")) and not target.startswith("reference/"):
            assert (page.parent / target).exists(), target


def test_each_limit_names_a_setting_and_a_test_that_exist() -> None:
    """A setting by its section, a constant by its name in capitals."""
    text = (ROOT / "docs/limits.md").read_text()
    tests = set(re.findall(r"`(tests/[\w/]+\.py)`", text))
    assert len(tests) > 15 and all((ROOT / test).exists() for test in tests)
    sections = {"limits": Limits, "timeouts": Timeouts, "admission": Admission}
    settings = re.findall(r"`(limits|timeouts|admission)\.(\w+)`", text)
    assert len(settings) > 10
    for section, name in settings:
        assert name in sections[section].model_fields, f"{section}.{name}"
    sources = "\n".join(path.read_text() for path in FILES.values())
    for name in set(re.findall(r"`([A-Z][A-Z_]+)`", text)):
        assert re.search(rf"^{name} = ", sources, re.MULTILINE), name


def test_the_reference_shows_examples_and_words() -> None:
    page = script("reference").commands()
    assert "octet export checkpoint calibration --format modelopt --kv e4m3 --tp 2" in page
    assert not re.search(r"`(False|True|None)`|\['", page)
    assert "`None`" not in script("reference").configuration()


def test_the_compatibility_page_is_written_from_the_hardware_model() -> None:
    made = script("compatibility")
    page = (ROOT / "docs" / "compatibility.md").read_text("utf-8")
    inside = page.partition(made.BEGIN)[2].partition(made.END)[0]
    assert inside == made.tables(), "run python docs/compatibility.py"


def script(name: str) -> ModuleType:
    """Loads a script of docs/."""
    spec = spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
