"""What quantization may cost, as a user writes it and as a measurement is held against it."""

import math
import re
from dataclasses import dataclass
from typing import Literal, Self

from calibrate.quality.divergence import Divergence
from octet.errors import ConfigError

__all__ = ["Limit"]

LEAST = 1e-6  # a float16 cache alone costs some 1e-7 nats


@dataclass(frozen=True)
class Limit:
    """What quantization may cost: `kl` in nats a token, `perplexity` as a relative increase."""

    metric: Literal["kl", "perplexity"]
    value: float

    @classmethod
    def parse(cls, text: str) -> Self:
        """From "kl=0.005" (nats) or "ppl=1%"; ConfigError for anything else."""
        metric, equals, value = text.replace(" ", "").partition("=")
        if metric not in ("kl", "ppl") or not equals:
            raise ConfigError(f"budget '{text}': write kl=0.005 (nats a token) or ppl=1%")
        if metric == "kl":
            return cls.of_kl(value, f"budget '{text}': kl", "kl=0.005")
        return cls.of_perplexity(value, f"budget '{text}': ppl", "ppl=1%")

    @classmethod
    def of_kl(cls, text: str, where: str, example: str) -> Self:
        """From "0.005"; `where` and `example` are for what a ConfigError says."""
        if text.endswith("%"):
            raise ConfigError(f"{where} is in nats, such as {example}")
        return cls("kl", _positive(text, 1.0, where))

    @classmethod
    def of_perplexity(cls, text: str, where: str, example: str) -> Self:
        """From "1%"."""
        if not text.endswith("%"):
            raise ConfigError(f"{where} is a percentage, such as {example}")
        return cls("perplexity", _positive(text.removesuffix("%"), 100.0, where))

    def __str__(self) -> str:
        return f"kl={self.value:g}" if self.metric == "kl" else f"ppl={100 * self.value:g}%"

    def estimate(self, cost: Divergence) -> float:
        """The best estimate of what is limited."""
        return cost.kl if self.metric == "kl" else cost.change

    def bound(self, cost: Divergence) -> float:
        """What is compared with the limit: see `Divergence.kl_bound`."""
        return cost.kl_bound if self.metric == "kl" else cost.change_bound

    def met(self, cost: Divergence) -> bool:
        return self.bound(cost) <= self.value

    def show(self, cost: Divergence) -> str:
        """Estimate and bound, for people."""
        return self.show_values(self.estimate(cost), self.bound(cost))

    def show_values(self, estimate: float, bound: float) -> str:
        """Likewise, of figures in the unit of `value`."""
        if self.metric == "kl":
            return f"{estimate:.2g} nats (95 % bound {bound:.2g})"
        return f"{100 * estimate:.2g} % of perplexity (95 % bound {100 * bound:.2g} %)"


def _positive(text: str, unit: float, where: str) -> float:
    """The number `text` in `unit`s of it to the whole; ConfigError unless it is one, and enough."""
    number = r"(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"
    if not re.fullmatch(number, text) or not 0 < float(text) < math.inf:
        raise ConfigError(f"{where}: '{text}' is not a positive number")
    if float(text) / unit < LEAST:
        least = f"{unit * LEAST:g}{'%' if unit > 1 else ''}"
        raise ConfigError(
            f"{where} must be at least {least}, about what rounding a float32 sum moves it by"
        )
    return float(text) / unit
