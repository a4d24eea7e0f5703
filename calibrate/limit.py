"""What quantization may cost, as a user writes it and as a measurement is held against it."""

import math
import re
from dataclasses import dataclass
from typing import Literal, Self

from calibrate.divergence import Divergence
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
        if (metric == "ppl") != value.endswith("%"):
            unit = (
                "a percentage, such as ppl=1%" if metric == "ppl" else "in nats, such as kl=0.005"
            )
            raise ConfigError(f"budget '{text}': {metric} is {unit}")
        number = value.removesuffix("%")
        if not re.fullmatch(r"\d*\.?\d+(e-?\d+)?", number) or not 0 < float(number) < math.inf:
            raise ConfigError(f"budget '{text}': '{number}' is not a positive number")
        limit = float(number) if metric == "kl" else float(number) / 100
        if limit < LEAST:
            least = f"{LEAST:g}" if metric == "kl" else f"{100 * LEAST:g}%"
            raise ConfigError(
                f"budget '{text}': {metric} must be at least {least}, about what rounding a"
                " float32 sum moves it by"
            )
        return cls("kl" if metric == "kl" else "perplexity", limit)

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
        low, high = self.estimate(cost), self.bound(cost)
        if self.metric == "kl":
            return f"{low:.2g} nats (95 % bound {high:.2g})"
        return f"{100 * low:.2g} % of perplexity (95 % bound {100 * high:.2g} %)"
