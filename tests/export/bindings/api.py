"""One release of TensorRT's Python API, read from signatures.txt."""

import re
from dataclasses import dataclass, field
from typing import Self

from tests.export.bindings import LISTED, SIGNATURES

__all__ = ["Api", "Signature"]


@dataclass(frozen=True)
class Signature:
    """A call: its parameters without `self`, those that may be left out, and what it returns."""

    parameters: tuple[str, ...]
    optional: frozenset[str]
    returns: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """From "(self: X, name: T = default) -> R"."""
        inner, _, returns = text.rpartition(") -> ")
        parts = [part.strip() for part in _split(inner[1:]) if part.strip()]
        names = [part.partition(":")[0].partition("=")[0].strip() for part in parts]
        optional = {name for name, part in zip(names, parts, strict=True) if "=" in part}
        own = tuple(name for name in names if name != "self")
        return cls(own, frozenset(optional), returns.strip())

    def accepts(self, positional: int, keywords: set[str]) -> bool:
        if "*args" in self.parameters:
            return True
        given = set(self.parameters[:positional])
        needed = set(self.parameters) - self.optional
        return (
            positional <= len(self.parameters)
            and keywords <= set(self.parameters) - given
            and needed <= given | keywords
        )


@dataclass
class Api:
    """Classes with their bases; members are `types` (attributes) or `calls`, by "Class.member"."""

    release: str
    bases: dict[str, list[str]] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    writable: set[str] = field(default_factory=set)
    calls: dict[str, list[Signature]] = field(default_factory=dict)

    @classmethod
    def load(cls, letter: str) -> Self:
        api = cls(" ".join(LISTED[letter]))
        for line in SIGNATURES.read_text().splitlines():
            letters, _, declared = line.partition(" ")
            if letter not in letters or line.startswith("#"):
                continue
            declared = declared.strip()
            if match := re.fullmatch(r"class ([\w.]+)\((.*)\)", declared):
                api.bases[match[1]] = [base for base in match[2].split(", ") if base]
            elif match := re.fullmatch(r"([\w.]+) = ([\w.]+)", declared):
                api.types[match[1]] = match[2]
            elif match := re.fullmatch(r"([\w.]+)(\(.*)", declared):
                api.calls.setdefault(match[1], []).append(Signature.parse(match[2]))
            elif match := re.fullmatch(r"([\w.]+): (.*?)( \(writable\))?", declared):
                api.types[match[1]] = match[2]
                if match[3]:
                    api.writable.add(match[1])
            else:
                raise ValueError(f"{SIGNATURES}: {line}")
        return api

    def find(self, owner: str, member: str) -> str | None:
        """ "Class.member" in `owner` or the first base that has it; None if none does."""
        name = f"{owner}.{member}"
        if name in self.types or name in self.calls or name in self.bases:
            return name
        found = (self.find(base, member) for base in self.bases.get(owner, []))
        return next((name for name in found if name), None)

    def members(self) -> set[str]:
        """The last part of every name."""
        return {name.rpartition(".")[2] for name in (*self.types, *self.calls, *self.bases)}


def _split(text: str) -> list[str]:
    """At commas outside brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += {"[": 1, "(": 1, "]": -1, ")": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts
