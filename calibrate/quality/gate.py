"""Whether a quantized model costs no more than it may, and which of its parts are to blame if not.

What is held against a limit is the upper end of a one-sided 95 % confidence interval, never the
estimate: a gate that is met says that on text like this, the divergence (or the change of the
perplexity) is with 95 % confidence within the limit. Little text makes the bound wide, and the
gate closes. The parts are those that are quantized together (`calibrate.quality.fused_units`) and
the cache; the share of each is its divergence with it alone quantized, in the sum of them all: what
they cost together may be more or less than that sum.

A model that is refused is not written. What was found is: see `calibrate.quality.refused`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from calibrate.quality.divergence import LEAST_SAMPLES, Divergence
from calibrate.quality.limit import Limit
from octet.errors import ConfigError, GateError, UnsupportedError
from octet.model.spec import ModelSpec
from octet.statistics import CONFIDENCE

__all__ = [
    "Gate",
    "Judged",
    "Outcome",
    "Part",
]

_PLAIN = 0.1  # a change this large or more needs its percent sign: "1" would be 100 %
_NAMED = 3  # parts in a message


@dataclass(frozen=True)
class Part:
    """One part of a model with it alone quantized: KL in nats with its standard error."""

    name: str
    linears: tuple[str, ...]  # () of the cache
    kl: float
    kl_error: float


@dataclass(frozen=True)
class Judged:
    """One limit, and what was measured: `bound` is the upper end of its 95 % interval.

    `on` says whose tokens ("held-out samples"), `how` what computed ("simulated in float32"). With
    a `caveat` ("a budget chose its formats on them") the bound has no such confidence.
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
        return self.bound <= self.limit.value  # never, if it is NaN

    def __str__(self) -> str:
        return (
            f"{self.limit.show_values(self.measured, self.bound)} on {self.tokens:,} tokens of"
            f" {self.samples} {self.on}, {self.how}"
        )

    @property
    def sentence(self) -> str:
        """With what it was held against."""
        said = f"{_option(self.limit)}: {self}: {'met' if self.met else 'not met'}"
        if self.caveat is None:
            return said
        return (
            f"{said}; {self.caveat}, so that the bound is none of 95 %: give more with --held-out"
        )

    def as_json(self) -> dict[str, Any]:
        """For a manifest."""
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
    """What each limit of a gate came to; `parts` are known where one was not met."""

    judged: tuple[Judged, ...]
    parts: tuple[Part, ...] = ()

    @property
    def met(self) -> bool:
        return all(judged.met for judged in self.judged)

    @property
    def sentences(self) -> tuple[str, ...]:
        """One of each limit."""
        return tuple(judged.sentence for judged in self.judged)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Of a report: what is over, and which parts cost most; what was met on doubtful text."""
        if not self.met:
            return (*self.sentences, self.blame)
        return tuple(judged.sentence for judged in self.judged if judged.caveat is not None)

    @property
    def facts(self) -> dict[str, str]:
        """Of a report."""
        return {"gate": "; ".join(self.sentences)}

    @property
    def ranked(self) -> tuple[Part, ...]:
        """What costs most by itself comes first."""
        return tuple(sorted(self.parts, key=lambda part: -part.kl))

    def blaming(self, parts: Sequence[Part]) -> "Outcome":
        """The same, with what each of `parts` costs alone."""
        return replace(self, parts=tuple(parts))

    def details(self) -> list[dict[str, Any]]:
        """For a manifest."""
        return [judged.as_json() for judged in self.judged]

    def error(self, out: Path, evidence: Path, *, again: str, budget: str | None) -> GateError:
        """What ends the command, with its `evidence` kept; `again` is what to call with other
        options (`octet calibrate`), `budget` what has a --budget, if that can be given."""
        first = next(judged for judged in self.judged if not judged.met)
        said = [f"{_option(judged.limit)}: {judged}" for judged in self.judged if not judged.met]
        remedy = self._remedy(first, again, budget)
        return GateError(
            f"{out} is not written, over {' and '.join(said)}; {self.blame}; {remedy}; evidence:"
            f" {evidence}"
        )

    @property
    def blame(self) -> str:
        """Which parts cost most, and how much of it all."""
        total = sum(part.kl for part in self.parts)
        if not total > 0:
            return "no part of it costs anything alone"
        named = [f"{part.name} ({part.kl / total:.0%})" for part in self.ranked[:_NAMED]]
        return f"of what its parts cost alone, most is of {', '.join(named)}"

    def _remedy(self, first: Judged, again: str, budget: str | None) -> str:
        ways = []
        if first.measured <= first.limit.value:
            ways.append("calibrate with more --held-out text, which narrows the bound")
        cause = self._causes()
        options = [f"--exclude {name}" for part in cause for name in part.linears]
        if any(not part.linears for part in cause):
            options.append("another --kv-cache")
        if options:
            ways.append(f"{again} with {' '.join(options)}")
        if budget is not None:
            given = "" if budget == again and options else f"{budget} with "
            ways.append(f"{given}--budget {first.limit}")
        return ", or ".join(ways) or "allow more, or choose another recipe"

    def _causes(self) -> list[Part]:
        """The fewest parts that make up half of it, if they are few enough to be left out."""
        half, chosen = sum(part.kl for part in self.parts) / 2, list[Part]()
        for part in self.ranked:
            if sum(one.kl for one in chosen) >= half:
                break
            chosen.append(part)
        return chosen if len(chosen) <= _NAMED else []

    def evidence(self, **more: Any) -> str:
        """The content of gate.json: limits, figures and parts, the costliest first."""
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
    """What a model may cost at most: one limit, or one of each metric."""

    limits: tuple[Limit, ...]

    @classmethod
    def parse(cls, max_kl: str | None, max_ppl_change: str | None) -> Self | None:
        """From what --max-kl (nats) and --max-ppl-change (1% or 0.01) were given; None of neither.

        ConfigError for what is no positive number, and for a change of 0.1 or more without a
        percent sign.
        """
        limits = []
        if max_kl is not None:
            where = f"--max-kl '{max_kl}'"
            limits.append(Limit.of_kl(max_kl.strip(), where, "--max-kl 0.005"))
        if max_ppl_change is not None:
            limits.append(_change(max_ppl_change))
        return cls(tuple(limits)) if limits else None

    def __str__(self) -> str:
        return " ".join(map(_option, self.limits))

    def check_spec(self, spec: ModelSpec, where: Path) -> None:
        """UnsupportedError for an architecture that cannot be simulated."""
        if spec.generic:
            raise UnsupportedError(
                f"{where}: {self} needs a simulation of the quantized model, and Octet does not"
                f" know {spec.architecture} well enough for one; leave the limit out, and measure"
                " what is served with `octet evaluate`"
            )

    def check_samples(self, lengths: Sequence[int], on: str, remedy: str) -> None:
        """ConfigError if samples of so many tokens cannot bound what is limited."""
        for limit in self.limits:
            least = 2 if limit.metric == "perplexity" else 1  # a first token is not predicted
            enough = sum(length >= least for length in lengths)
            if enough < LEAST_SAMPLES:
                long = " of two tokens or more" if least > 1 else ""
                raise ConfigError(
                    f"{_option(limit)}: {enough} of {len(lengths)} {on}{long} cannot bound what"
                    f" quantization costs, which takes {LEAST_SAMPLES}: {remedy}"
                )

    def judge(self, cost: Divergence, on: str, how: str, caveat: str | None = None) -> Outcome:
        """`cost` held against every limit."""
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
    """As it is given on the command line."""
    if limit.metric == "kl":
        return f"--max-kl {limit.value:g}"
    return f"--max-ppl-change {100 * limit.value:g}%"


def _change(text: str) -> Limit:
    given, where = text.strip(), f"--max-ppl-change '{text}'"
    example = "--max-ppl-change 1%"
    if given.endswith("%"):
        return Limit.of_perplexity(given, where, example)
    value = Limit.of_kl(given, where, example).value  # a plain number, read in the same way
    if value >= _PLAIN:
        raise ConfigError(f"{where}: write {value:g}% or {100 * value:g}%; it could mean either")
    return Limit("perplexity", value)
