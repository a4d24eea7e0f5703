"""Accuracy gate: decides whether a quantized model is within its limits, and names costly parts.

A limit is compared with the upper end of a one-sided 95 % confidence interval, never with the
estimate. A gate that is met states with 95 % confidence that on text like this, the divergence (or
the change of the perplexity) is within the limit. Little text makes the bound wide, and the gate
fails. Parts are the units that are quantized together (`calibrate.quality.fused_units`) and the
cache. A part's share is its divergence when quantized alone, divided by the sum over all parts;
the cost of all together may be more or less than that sum.

A refused model is not written, but a report is: see `calibrate.quality.refused`.
"""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from octet.errors import ConfigError, GateError, UnsupportedError
from octet.limit import LEAST_SAMPLES, Cost, Limit, parse_limits
from octet.model.spec import ModelSpec
from octet.recipe import patterns_of
from octet.statistics import CONFIDENCE

__all__ = [
    "Gate",
    "Judged",
    "Outcome",
    "Part",
]

_NAMED = 3  # parts named in a message, at most


@dataclass(frozen=True)
class Part:
    """One part of a model and its KL in nats, with standard error, when quantized alone."""

    name: str
    linears: tuple[str, ...]  # () for the cache
    kl: float
    kl_error: float


@dataclass(frozen=True)
class Judged:
    """One limit and its measurement; `bound` is the upper end of the 95 % interval.

    `on` names the text ("held-out samples") and `how` the computation ("simulated in float32").
    With a `caveat` ("a budget chose its formats on them") the bound does not have 95 % confidence.
    """

    limit: Limit
    measured: float
    bound: float
    tokens: int
    samples: int
    on: str
    how: str
    caveat: str | None = None

    @property
    def met(self) -> bool:
        return self.bound <= self.limit.value  # False if the bound is NaN

    def __str__(self) -> str:
        return (
            f"{self.limit.show_values(self.measured, self.bound)} on {self.tokens:,} tokens of"
            f" {self.samples} {self.on}, {self.how}"
        )

    @property
    def sentence(self) -> str:
        """Text with the limit, the measurement and the result."""
        said = f"{_option(self.limit)}: {self}: {'met' if self.met else 'not met'}"
        if self.caveat is None:
            return said
        return (
            f"{said}; {self.caveat}, so the bound does not have 95 % confidence: give more text"
            " with --held-out"
        )

    def as_json(self) -> dict[str, Any]:
        """Returns plain data for a manifest."""
        return {
            "metric": self.limit.metric,
            "limit": self.limit.value,
            "measured": self.measured,
            "bound": self.bound,
            "confidence": CONFIDENCE if self.caveat is None else None,
            "met": self.met,
            "tokens": self.tokens,
            "samples": self.samples,
            "on": self.on,
            "how": self.how,
            "text": self.sentence,
        }


@dataclass(frozen=True)
class Outcome:
    """Result of a gate for each limit; `parts` are measured if one was not met."""

    judged: tuple[Judged, ...]
    parts: tuple[Part, ...] = ()

    @property
    def met(self) -> bool:
        return all(judged.met for judged in self.judged)

    @property
    def sentences(self) -> tuple[str, ...]:
        """One sentence for each limit."""
        return tuple(judged.sentence for judged in self.judged)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Report warnings: limits and the costliest parts if not met, else limits with a caveat."""
        if not self.met:
            return (*self.sentences, self.blame)
        return tuple(judged.sentence for judged in self.judged if judged.caveat is not None)

    @property
    def facts(self) -> dict[str, str]:
        """Facts for a report."""
        return {"gate": "; ".join(self.sentences)}

    @property
    def ranked(self) -> tuple[Part, ...]:
        """Parts in descending order of their cost alone."""
        return tuple(sorted(self.parts, key=lambda part: -part.kl))

    def blaming(self, parts: Sequence[Part]) -> "Outcome":
        """Returns the same outcome with the cost of each part alone."""
        return replace(self, parts=tuple(parts))

    def details(self) -> list[dict[str, Any]]:
        """Returns plain data for a manifest, an entry for each limit."""
        return [judged.as_json() for judged in self.judged]

    def error(
        self,
        out: Path,
        evidence: Path,
        *,
        again: str,
        budget: str | None,
        command: str = "calibrate",
    ) -> GateError:
        """Returns the error that ends the command, after the report was written to `evidence`.

        `again` is the command to repeat with other options, `budget` the one that accepts --budget,
        or None if none can be given. `command` is the one that accepts --held-out.
        """
        first = next(judged for judged in self.judged if not judged.met)
        said = [f"{_option(judged.limit)}: {judged}" for judged in self.judged if not judged.met]
        remedy = self._remedy(first, again, budget, command)
        return GateError(
            f"{out} is not written, over {' and '.join(said)}; {self.blame}; {remedy}; report:"
            f" {evidence}"
        )

    @property
    def blame(self) -> str:
        """Text that names the costliest parts and their shares."""
        total = sum(part.kl for part in self.parts)
        if not total > 0:
            return "measured alone, no part of it costs anything"
        named = [f"{part.name} ({part.kl / total:.0%})" for part in self.ranked[:_NAMED]]
        return f"measured alone, the costliest parts are {', '.join(named)}"

    def _remedy(self, first: Judged, again: str, budget: str | None, command: str) -> str:
        ways = []
        if first.measured <= first.limit.value:
            ways.append(f"{command} with more --held-out text, which narrows the bound")
        cause = self._causes()
        linears = (name for part in cause for name in part.linears)
        excluded = " ".join(f"--exclude {shlex.quote(one)}" for one in patterns_of(linears))
        options = [excluded] if excluded else []
        if any(not part.linears for part in cause):
            options.append("another --kv-cache")
        if options:
            ways.append(f"{again} with {' and '.join(options)}")
        if budget is not None:
            given = "" if budget == again and options else f"{budget} with "
            ways.append(f"{given}--budget {first.limit}")
        return ", or ".join(ways) or "raise the limit, or choose another recipe"

    def _causes(self) -> list[Part]:
        """Returns the fewest parts that cost half of the sum, or [] if over `_NAMED` are needed."""
        half, chosen = sum(part.kl for part in self.parts) / 2, list[Part]()
        for part in self.ranked:
            if sum(one.kl for one in chosen) >= half:
                break
            chosen.append(part)
        return chosen if len(chosen) <= _NAMED else []

    def evidence(self, **more: Any) -> str:
        """Returns the content of gate.json: limits, measurements and parts, the costliest first."""
        total = sum(part.kl for part in self.parts)
        parts = [
            {
                "name": part.name,
                "linears": list(part.linears),
                "kl": part.kl,
                "kl_error": part.kl_error,
                "share": part.kl / total if total > 0 else None,
            }
            for part in self.ranked
        ]
        return json.dumps({"gate": self.details(), "parts": parts, **more}, indent=1) + "\n"


@dataclass(frozen=True)
class Gate:
    """Limits on the cost of quantization: one limit, or one of each metric."""

    limits: tuple[Limit, ...]

    @classmethod
    def parse(cls, max_kl: str | None, max_ppl_change: str | None) -> Self | None:
        """Returns the gate of these options, see `parse_limits`; None if neither is given."""
        limits = parse_limits(max_kl, max_ppl_change)
        return cls(limits) if limits else None

    def __str__(self) -> str:
        return " ".join(map(_option, self.limits))

    def check_spec(self, spec: ModelSpec, where: Path) -> None:
        """Raises UnsupportedError for an architecture that cannot be simulated."""
        if spec.generic:
            raise UnsupportedError(
                f"{where}: {self} needs a simulation of the quantized model, and Octet does not"
                f" know {spec.architecture} well enough for one; leave the limit out, and measure"
                " what is served with `octet evaluate`"
            )

    def check_samples(self, lengths: Sequence[int], on: str, remedy: str) -> None:
        """Raises ConfigError if samples of these `lengths` cannot bound a limited metric."""
        for limit in self.limits:
            least = 2 if limit.metric == "perplexity" else 1  # a first token is not predicted
            enough = sum(length >= least for length in lengths)
            if enough < LEAST_SAMPLES:
                long = " of two tokens or more" if least > 1 else ""
                raise ConfigError(
                    f"{_option(limit)}: {enough} of {len(lengths)} {on}{long} cannot bound what"
                    f" quantization costs, which takes {LEAST_SAMPLES}: {remedy}"
                )

    def judge(self, cost: Cost, on: str, how: str, caveat: str | None = None) -> Outcome:
        """Compares `cost` with every limit."""
        return Outcome(
            tuple(
                Judged(
                    limit,
                    limit.estimate(cost),
                    limit.bound(cost),
                    cost.tokens,
                    cost.samples,
                    on,
                    how,
                    caveat,
                )
                for limit in self.limits
            )
        )


def _option(limit: Limit) -> str:
    """Returns the limit as a command-line option."""
    if limit.metric == "kl":
        return f"--max-kl {limit.value:g}"
    return f"--max-ppl-change {100 * limit.value:g}%"
