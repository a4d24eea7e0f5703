"""Reads the code blocks of README.md and docs/, which tests check and run."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.layout import ROOT

__all__ = ["LANGUAGES", "OWN", "PAGES", "Block", "blocks_of", "words_of"]

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = ("bash", "json", "python", "text", "yaml")
OWN = {"octet": (), "calibrate": ("calibrate",), "build-engine": ("build-engine",)}

# A fenced block, which a comment before it may keep from being run.
_BLOCK = re.compile(
    r"(?:^ *<!-- not run: (?P<reason>[^\n]*?) -->\n\s*)?"
    r'^(?P<indent> *)```(?P<language>\w*)(?: title="(?P<title>[^"\n]+)")?\n'
    r"(?P<text>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A code block of a page. `title` is the file that it shows, `reason` why it is not run."""

    page: Path
    line: int
    language: str
    title: str
    reason: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def commands(self) -> Iterator[str]:
        """Yields the lines of a shell block, joined where a backslash ends them."""
        for line in self.text.replace("\\\n", " ").splitlines():
            if line.strip() and not line.lstrip().startswith("#"):
                yield line.strip()


def blocks_of(page: Path) -> list[Block]:
    content = page.read_text()
    found = []
    for match in _BLOCK.finditer(content):
        indent = match["indent"]
        text = "".join(
            line.removeprefix(indent) for line in match["text"].splitlines(keepends=True)
        )
        line = content.count("\n", 0, match.start("indent")) + 1
        title, reason = match["title"] or "", match["reason"] or ""
        found.append(Block(page, line, match["language"], title, reason, text))
    return found


def words_of(command: str) -> list[str]:
    """Returns the words after `octet` of one of our commands; of any other, nothing.

    Words behind `--` belong to another program.
    """
    first, *others = shlex.split(command, comments=True) or [""]
    others = others[: others.index("--")] if "--" in others else others
    return [*OWN[first], *others] if first in OWN else []
