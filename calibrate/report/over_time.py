"""Reports a replay: what each rule of scaling does to each domain, and where domains differ."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from calibrate.quality.rule_costs import MeanKl
from calibrate.scales.activations import Effect
from calibrate.scales.domains import Comparison
from calibrate.scales.over_time import RULES, Delayed, Rule, TensorOverTime
from octet.tables import Stacked

__all__ = ["DomainCounts", "Outcome", "Replay", "nats", "render", "share"]

_DOMAINS, _TENSORS = 4, 4  # rows of each table in the terminal


@dataclass(frozen=True)
class DomainCounts:
    """The size of a domain in a stream."""

    samples: int = 0
    steps: int = 0
    tokens: int = 0

    def after(self, samples: int, tokens: int) -> "DomainCounts":
        """Returns the size after one more step."""
        return DomainCounts(self.samples + samples, self.steps + 1, self.tokens + tokens)


@dataclass(frozen=True)
class Outcome:
    """Effect of a rule on a domain, over all tensors.

    `saturated` and `underflow` are shares of all elements. `error` is the median over the tensors
    of the squared error relative to the squares; `worst` is the tensor with the largest. `kl` is
    the next-token divergence that rounding by the rule causes, if it was measured.
    """

    saturated: float
    underflow: float
    error: float
    worst_error: float
    worst: str
    kl: MeanKl | None

    def as_json(self) -> dict[str, Any]:
        kl = None if self.kl is None else {"mean": self.kl.mean, "error": self.kl.error}
        return vars(self) | {"kl": kl}


@dataclass(frozen=True)
class Replay:
    """The result of a replay; `tensors` and `compared` are by observation."""

    calibration: str
    recipe: str
    stream: str
    delayed: Delayed
    batch_size: int
    domains: Mapping[str, DomainCounts]
    tensors: Mapping[str, TensorOverTime]
    compared: Mapping[str, Comparison]
    kl: Mapping[tuple[str, Rule], MeanKl]  # {} if it was not measured
    notes: tuple[str, ...]
    interrupted: bool = False  # before the end of the stream

    def outcome(self, domain: str, rule: Rule) -> Outcome:
        found = {
            name: tensor.effects[domain, rule]
            for name, tensor in self.tensors.items()
            if tensor.effects[domain, rule].elements
        }
        total = sum(found.values(), Effect())
        worst = max(found, key=lambda name: found[name].relative_error)
        return Outcome(
            total.saturated / total.elements,
            total.underflow / total.elements,
            median(effect.relative_error for effect in found.values()),
            found[worst].relative_error,
            worst,
            self.kl.get((domain, rule)),
        )

    def change(self, domain: str) -> tuple[float, str]:
        """Returns how far a domain's own scale is from the calibration's, and of which tensor.

        It is the ratio farthest from 1, in either direction.
        """
        ratios = {
            name: found.scales[domain] / self.tensors[name].frozen
            for name, found in self.compared.items()
            if domain in found.scales
        }
        name = max(ratios, key=lambda name: abs(math.log2(ratios[name])))
        return ratios[name], name

    @property
    def ordered(self) -> list[str]:
        """The domains, those first whose scales differ most from the calibration's."""
        return sorted(self.domains, key=lambda x: -abs(math.log2(self.change(x)[0])))

    @property
    def differing(self) -> list[str]:
        """The tensors, those first whose scales differ most between domains."""
        return sorted(self.tensors, key=lambda name: -self.compared[name].ratio)

    @property
    def head(self) -> str:
        """Returns what was replayed, in one line."""
        samples, steps, tokens = (
            sum(getattr(x, kind) for x in self.domains.values())
            for kind in ("samples", "steps", "tokens")
        )
        delayed = self.delayed
        return (
            f"{self.stream} over {self.calibration} ({self.recipe}): {samples:,} samples,"
            f" {tokens:,} tokens in {steps:,} steps; delayed scaling with a history of"
            f" {delayed.history:,} ({delayed.algorithm}) and a margin of {delayed.margin}"
        )

    def lines(self) -> list[str]:
        """Describes each domain in one line."""
        found = []
        for domain in self.ordered:
            ratio, name = self.change(domain)
            size = self.domains[domain]
            found.append(
                f"{domain}: {size.samples:,} samples, {size.steps:,} steps; its own scale is"
                f" {ratio:.3g} times the calibration's in {name}"
            )
        return found

    def as_json(self) -> dict[str, Any]:
        """Returns every figure as plain data, in the same order as the report."""
        return {
            "calibration": self.calibration,
            "recipe": self.recipe,
            "stream": self.stream,
            "batch_size": self.batch_size,
            "delayed": vars(self.delayed),
            "domains": [self._domain(domain) for domain in self.ordered],
            "tensors": [self._tensor(name) for name in self.differing],
            "notes": list(self.notes),
            "interrupted": self.interrupted,
        }

    def _domain(self, domain: str) -> dict[str, Any]:
        ratio, name = self.change(domain)
        return {
            "domain": domain,
            **vars(self.domains[domain]),
            "farthest_scale": {"tensor": name, "ratio": ratio},
            "rules": {rule: self.outcome(domain, rule).as_json() for rule in RULES},
        }

    def _tensor(self, name: str) -> dict[str, Any]:
        tensor, compared = self.tensors[name], self.compared[name]
        domains = {
            domain: {
                "scale": compared.scales.get(domain),
                "absmax": tensor.histogram(domain).absmax,
                "rules": {rule: _figures(tensor.effects[domain, rule]) for rule in RULES},
                "with_scale_of": {
                    of: _figures(effect)
                    for (of, on), effect in compared.costs.items()
                    if on == domain
                },
            }
            for domain in self.domains
        }
        return {
            "tensor": name,
            "format": tensor.format.name,
            "frozen_scale": tensor.frozen,
            "scale_ratio": compared.ratio,
            "distance": compared.distance,
            "domains": domains,
        }


def render(replay: Replay) -> RenderableType:
    """Renders the tables for the terminal: domains by rule, then tensors in which they differ."""
    parts: list[RenderableType] = [Text(replay.head), Text("")]
    lines = replay.lines()
    parts += [Text(line) for line in lines[:_DOMAINS]]
    if len(lines) > _DOMAINS:
        parts.append(Text(f"and {len(lines) - _DOMAINS} more domains: --json and --html have all"))
    parts += [Text(""), Stacked(_rules(replay))]
    if len(replay.domains) > 1:
        parts += [Text(""), Stacked(_differences(replay))]
    parts += [Text(f"note: {note}") for note in replay.notes]
    return Group(*parts)


def _rules(replay: Replay) -> Table:
    kl = ("KL, nats",) if replay.kl else ()
    table = _table("domain, scaling", *kl, "saturated", "to zero", "error", "worst error")
    table.add_column("in", overflow="fold")
    for domain in replay.ordered[:_DOMAINS]:
        for rule in RULES:
            found = replay.outcome(domain, rule)
            table.add_row(
                f"{domain}, {rule}",
                *nats(found.kl),
                share(found.saturated),
                share(found.underflow),
                f"{found.error:.2g}",
                f"{found.worst_error:.2g}",
                found.worst.removeprefix("model."),
            )
    return table


def _differences(replay: Replay) -> Table:
    table = _table("tensor", "scales differ", "distance", "error", "saturated")
    table.add_column("with the scale of", overflow="fold")
    for name in replay.differing[:_TENSORS]:
        found = replay.compared[name]
        cells = ["", "", ""]
        if found.worst is not None:
            of, on = found.worst
            cost = found.costs[of, on]
            own = found.own[on].relative_error
            error = f"{own:.2g} -> {cost.relative_error:.2g}"
            cells = [error, share(cost.saturated / cost.elements), f"{of} on {on}"]
        short = name.removeprefix("model.")
        table.add_row(short, f"x {found.ratio:.3g}", f"{found.distance:.3f}", *cells)
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column(first, overflow="fold")
    for title in others:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def share(value: float) -> str:
    """Formats a share so that a small one does not look like none."""
    if value == 0:
        return "0"
    return f"{value:.2%}" if value >= 5e-5 else f"{value:.0e}"


def nats(kl: MeanKl | None) -> tuple[str, ...]:
    """Formats a divergence with its standard error, as one cell; as none if it was not measured."""
    if kl is None:
        return ()
    return (f"{kl.mean:.2g}" if kl.error is None else f"{kl.mean:.2g} ± {kl.error:.1g}",)


def _figures(effect: Effect) -> dict[str, float]:
    total = max(effect.elements, 1)
    return {
        "saturated": effect.saturated / total,
        "underflow": effect.underflow / total,
        "relative_squared_error": effect.relative_error,
    }
