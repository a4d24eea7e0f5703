"""Limits on the cost of quantization: parses them, and compares measurements with them.

Loads no library, so that a command can refuse a malformed limit before it imports torch.
"""

import math
import re
from dataclasses import dataclass
from typing import Literal, Protocol, Self

from octet.errors import ConfigError

__all__ = ["DEFAULT_KL", "LEAST_SAMPLES", "Cost", "Limit", "parse_limits"]

LEAST_SAMPLES = 8  # with fewer samples, a bound is two standard errors or more above the mean

# The divergence in nats that an export may be predicted to have where no limit is given: about four
# times the most that was measured with each format (`benchmarks/results/reference_models-*`).
DEFAULT_KL = {"fp8": 0.05, "mxfp8": 0.05, "nvfp4": 0.25, "mxfp4": 0.5}

LEAST = 1e-6  # a float16 cache alone costs some 1e-7 nats
_LARGEST_PLAIN = 0.1  # a change of this or more needs a percent sign: "1" would be 100 %


class Cost(Protocol):
    """A cost measured on some text: KL in nats, relative change of perplexity, and their bounds."""

    @property
    def kl(self) -> float: ...
    @property
    def kl_bound(self) -> float: ...
    @property
    def change(self) -> float: ...
    @property
    def change_bound(self) -> float: ...
    @property
    def tokens(self) -> int: ...
    @property
    def samples(self) -> int: ...


@dataclass(frozen=True)
class Limit:
    """Highest acceptable cost: `kl` in nats a token, `perplexity` as a relative increase."""

    metric: Literal["kl", "perplexity"]
    value: float

    @classmethod
    def parse(cls, text: str, what: str = "budget") -> Self:
        """Parses "kl=0.005" (nats) or "ppl=1%", also with a colon.

        Raises ConfigError for anything else; `what` names the option in its message.
        """
        metric, equals, value = text.replace(" ", "").replace(":", "=").partition("=")
        if metric not in ("kl", "ppl") or not equals:
            raise ConfigError(f"{what} '{text}': write kl=0.005 (nats a token) or ppl=1%")
        if metric == "kl":
            return cls.of_kl(value, f"{what} '{text}': kl", "kl=0.005")
        return cls.of_perplexity(value, f"{what} '{text}': ppl", "ppl=1%")

    @classmethod
    def of_kl(cls, text: str, where: str, example: str) -> Self:
        """Parses "0.005"; `where` and `example` appear in the message of a ConfigError."""
        if text.endswith("%"):
            raise ConfigError(f"{where} is in nats, such as {example}")
        return cls("kl", _positive(text, 1.0, where))

    @classmethod
    def of_perplexity(cls, text: str, where: str, example: str) -> Self:
        """Parses "1%"."""
        if not text.endswith("%"):
            raise ConfigError(f"{where} is a percentage, such as {example}")
        return cls("perplexity", _positive(text.removesuffix("%"), 100.0, where))

    def __str__(self) -> str:
        return f"kl={self.value:g}" if self.metric == "kl" else f"ppl={100 * self.value:g}%"

    def estimate(self, cost: Cost) -> float:
        """Returns the best estimate of the limited metric."""
        return cost.kl if self.metric == "kl" else cost.change

    def bound(self, cost: Cost) -> float:
        """Returns the upper bound that is compared with the limit."""
        return cost.kl_bound if self.metric == "kl" else cost.change_bound

    def met(self, cost: Cost) -> bool:
        return self.bound(cost) <= self.value

    def show(self, cost: Cost) -> str:
        """Formats estimate and bound as text."""
        return self.show_values(self.estimate(cost), self.bound(cost))

    def show_values(self, estimate: float, bound: float) -> str:
        """Formats `estimate` and `bound`, both in the unit of `value`, as text."""
        if self.metric == "kl":
            return f"{estimate:.2g} nats (95 % bound {bound:.2g})"
        return f"{100 * estimate:.2g} % of perplexity (95 % bound {100 * bound:.2g} %)"


def parse_limits(max_kl: str | None, max_ppl_change: str | None) -> tuple[Limit, ...]:
    """Parses the values of --max-kl (nats) and --max-ppl-change (1% or 0.01), if given.

    Raises ConfigError for a value that is not a positive number, and for a change of 0.1 or more
    without a percent sign.
    """
    limits = []
    if max_kl is not None:
        where = f"--max-kl '{max_kl}'"
        limits.append(Limit.of_kl(max_kl.strip(), where, "--max-kl 0.005"))
    if max_ppl_change is not None:
        limits.append(_perplexity_limit(max_ppl_change))
    return tuple(limits)


def _perplexity_limit(text: str) -> Limit:
    """Parses the value of --max-ppl-change."""
    given, where = text.strip(), f"--max-ppl-change '{text}'"
    example = "--max-ppl-change 1%"
    if given.endswith("%"):
        return Limit.of_perplexity(given, where, example)
    value = Limit.of_kl(given, where, example).value  # a plain number is parsed like a KL
    if value >= _LARGEST_PLAIN:
        raise ConfigError(f"{where}: write {value:g}% or {100 * value:g}%; it could mean either")
    return Limit("perplexity", value)


def _positive(text: str, unit: float, where: str) -> float:
    """Returns `text` / `unit`; raises ConfigError if it is not a positive number, or too small."""
    number = r"(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"
    if not re.fullmatch(number, text) or not 0 < float(text) < math.inf:
        raise ConfigError(f"{where}: '{text}' is not a positive number")
    if float(text) / unit < LEAST:
        least = f"{unit * LEAST:g}{'%' if unit > 1 else ''}"
        raise ConfigError(
            f"{where} must be at least {least}, about what rounding a float32 sum moves it by"
        )
    return float(text) / unit
