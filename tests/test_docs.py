"""The documents: their commands and options exist, and so does what they link to."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from octet_cli.main import app
from serve.config.gateway import Limits
from serve.config.pools import Admission, Timeouts
from tests.layout import FILES, ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"```(?:bash|sh)?\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
OWN = {"octet": (), "calibrate": ("calibrate",), "build-engine": ("build-engine",)}


def commands_of(text: str) -> list[list[str]]:
    """Returns the words of each of our commands in the shell blocks of a page."""
    found = []
    for block in BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            if line.split(" ")[0] in OWN:
                first, *others = shlex.split(line, comments=True)
                found.append([*OWN[first], *others])
    return found


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


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_and_option_in_a_page_exists(page: Path) -> None:
    for words in commands_of(page.read_text()):
        names, rest = options_of(words)
        unknown = [x for x in rest if re.match("--?[a-z]", x) and x.split("=")[0] not in names]
        assert not unknown, f"{' '.join(words)}: no option {unknown}"


def test_commands_are_found() -> None:
    assert len([x for page in PAGES for x in commands_of(page.read_text())]) > 40


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
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
