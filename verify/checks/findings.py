"""Findings of a verification: a row for each tensor, problems, notes, and omitted checks."""

import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from verify.checks.original import Original

__all__ = ["Divergence", "LayerRow", "Problem", "Row", "Verification", "decibels", "layer_of"]

Check = Literal["files", "configuration", "names", "scales", "copies", "numbers", "divergence"]


@dataclass(frozen=True)
class Problem:
    """A fault; `where` is a tensor, a module, a file or a key of the configuration."""

    check: Check
    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(frozen=True)
class Row:
    """Error of a quantized tensor against the original; `signal` and `noise` are sums of squares.

    `relative` is ‖error‖ / ‖original‖. `expected` is the SQNR in dB of plain rounding with scales
    from the absolute maximum, in the same format and granularity. `unrounded` counts elements that
    are not the format's nearest value to the original.
    """

    tensor: str
    layer: str
    stored: str
    elements: int
    max_abs: float
    signal: float
    noise: float
    expected: float | None
    unrounded: int = 0

    @property
    def relative(self) -> float:
        return math.sqrt(self.noise / self.signal) if self.signal > 0 else 0.0

    @property
    def sqnr(self) -> float:
        return decibels(self.signal, self.noise)

    @property
    def margin(self) -> float:
        """SQNR above the expected one, in dB; negative if worse."""
        return self.sqnr - self.expected if self.expected is not None else 0.0


@dataclass(frozen=True)
class LayerRow:
    """All quantized tensors of a decoder layer together."""

    layer: str
    tensors: int
    sqnr: float
    expected: float | None
    max_abs: float
    worst: str


@dataclass(frozen=True)
class Divergence:
    """KL(original ‖ written) of the next token, nats, mean over the golden prompts."""

    mean: float
    low: float  # the accepted range is low to high
    high: float
    prompts: int
    path: str  # how it was computed: by the graph itself, or by simulating a serving path
    source: str  # where the range comes from

    @property
    def inside(self) -> bool:
        return self.low <= self.mean <= self.high  # never, if it is NaN


@dataclass
class Verification:
    """The findings about the artifact at `path`."""

    path: Path
    kind: str
    format: str
    made_by: str = "Octet"
    rows: list[Row] = field(default_factory=list)
    copied: int = 0  # tensors found equal to the original's, bit for bit
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # worth knowing, but not a problem
    unchecked: list[str] = field(default_factory=list)  # omitted checks that the user can enable
    divergence: Divergence | None = None
    original: Original | None = None  # what it was compared with

    @property
    def ok(self) -> bool:
        """True if nothing is wrong; if `unchecked` is empty as well, everything was checked."""
        return not self.problems

    @property
    def exit_code(self) -> int:
        """0: all is fine; 1: something is wrong; 2: nothing is wrong, but checks were omitted."""
        return 1 if self.problems else 2 if self.unchecked else 0

    def problem(self, check: Check, where: str, what: str) -> None:
        self.problems.append(Problem(check, where, what))

    def add(self, part: "Verification", where: str) -> None:
        """Adds the findings about the part at the relative path `where`."""
        self.rows += part.rows
        self.copied += part.copied
        self.problems += [
            replace(problem, where=f"{where}: {problem.where}") for problem in part.problems
        ]
        self.notes += [f"{where}: {note}" for note in part.notes]
        self.unchecked += [text for text in part.unchecked if text not in self.unchecked]
        self.format += f"; {where}: {part.kind}, {part.format}"

    @property
    def worst_first(self) -> list[Row]:
        """Rows with problems first, then by margin to the expected SQNR, then by SQNR."""
        wrong = {problem.where for problem in self.problems}
        return sorted(
            self.rows, key=lambda row: (row.tensor not in wrong, row.margin, row.sqnr, row.tensor)
        )

    @property
    def layers(self) -> list[LayerRow]:
        """One row per layer, in the order of the model."""
        names = dict.fromkeys(row.layer for row in self.rows)
        return [_layer(name, [row for row in self.rows if row.layer == name]) for name in names]

    def as_json(self) -> dict[str, Any]:
        """Returns everything as JSON data; NaN and infinite numbers are null."""
        return {
            "path": str(self.path),
            "kind": self.kind,
            "format": self.format,
            "made_by": self.made_by,
            "ok": self.ok,
            "exit_code": self.exit_code,
            "problems": [asdict(problem) for problem in self.problems],
            "notes": self.notes,
            "unchecked": self.unchecked,
            "copied": self.copied,
            "divergence": None
            if self.divergence is None
            else asdict(self.divergence)
            | {"mean": _finite(self.divergence.mean), "inside": self.divergence.inside},
            "layers": [
                {key: _finite(value) for key, value in asdict(layer).items()}
                for layer in self.layers
            ],
            "tensors": [
                {
                    "tensor": row.tensor,
                    "stored": row.stored,
                    "elements": row.elements,
                    "max_abs": _finite(row.max_abs),
                    "relative": _finite(row.relative),
                    "sqnr": _finite(row.sqnr),
                    "expected": _finite(row.expected),
                    "unrounded": row.unrounded,
                }
                for row in self.rows
            ],
        }


def decibels(signal: float, noise: float) -> float:
    """Returns the SNR in dB: inf without noise; -inf without signal, or if one is not finite."""
    if not (math.isfinite(signal) and math.isfinite(noise)):
        return -math.inf
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


def layer_of(name: str) -> str:
    """Returns the decoder layer of a tensor or module; outside of layers, its parent's name."""
    found = re.match(r"(.*?\blayers\.\d+)\.", name)
    return found.group(1) if found else name.rpartition(".")[0]


def _layer(name: str, rows: Iterable[Row]) -> LayerRow:
    rows = list(rows)
    signal, noise = sum(row.signal for row in rows), sum(row.noise for row in rows)
    known = [row for row in rows if row.expected is not None]
    expected = None
    if len(known) == len(rows):
        floor = sum(row.signal / 10 ** ((row.expected or 0.0) / 10) for row in known)
        expected = decibels(signal, floor)
    worst = min(rows, key=lambda row: (row.margin, row.sqnr))
    largest = max(row.max_abs for row in rows)
    return LayerRow(name, len(rows), decibels(signal, noise), expected, largest, worst.tensor)


def _finite(value: Any) -> Any:
    """Replaces an infinite number or NaN by None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
