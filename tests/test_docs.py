"""The documents: their commands and options exist, and so does what they link to."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from octet_cli.main import app
from tests.layout import ROOT

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
