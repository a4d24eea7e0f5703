"""Chooses the parts of a model to keep in higher precision, so that its cost stays in a budget.

The search starts with the recipe everywhere. While that is over budget, it promotes one unit by a
format, or to BF16: the unit with the largest reduction of divergence per byte, judged by its cost
alone. Then it measures the whole model again. Each step takes one forward pass over the batches,
and one more for each unit considered at a format between the recipe's and BF16.

A limit is compared with the upper end of a one-sided 95 % confidence interval, not with the
estimate. The interval assumes a recipe fixed beforehand. Here the same text decides which units are
promoted and when to stop, so the final figure is somewhat optimistic, the more so the fewer samples
there are. `LEAST_SAMPLES` are required.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from calibrate.journal.steps import NOT_KEPT, Steps
from calibrate.quality.divergence import Advance, Divergence, Reference
from calibrate.quality.precision_levels import build_recipe
from calibrate.quality.promotion import Promotion
from calibrate.quality.sensitivity import Sensitivity
from calibrate.samples.batches import Batch
from calibrate.scales.derive import Quantization
from calibrate.simulate.model import simulate_modules
from octet.errors import ConfigError
from octet.limit import LEAST_SAMPLES, Limit
from octet.recipe import Recipe

__all__ = ["Budget", "Limit", "Step", "check_reachable", "check_samples", "choose"]


@dataclass(frozen=True)
class Step:
    """The whole model after `promoted` moved to format `to`; both None for the recipe itself."""

    promoted: str | None
    to: str | None
    weight_bytes: int  # of all weights with their scales
    kl: float
    perplexity: float
    bound: float  # of the limited metric


@dataclass(frozen=True)
class Budget:
    """The recipe chosen for `limit`, and the steps of the search.

    `reached` and `bound` are the final values of the limited metric. `chosen` are the promoted
    units of all `units`, with their formats, in the order of the model.
    """

    limit: Limit
    reached: float
    bound: float
    met: bool
    curve: tuple[Step, ...]
    chosen: tuple[tuple[str, str], ...]
    units: int
    recipe: Recipe
    tokens: int
    evaluated_on: str

    def as_json(self) -> dict[str, Any]:
        """Returns plain data for report.json."""
        return {
            "metric": self.limit.metric,
            "limit": self.limit.value,
            "reached": self.reached,
            "bound": self.bound,
            "met": self.met,
            "tokens": self.tokens,
            "evaluated_on": self.evaluated_on,
            "curve": [asdict(step) for step in self.curve],
            "chosen": [{"unit": unit, "to": to} for unit, to in self.chosen],
            "units": self.units,
        }


def check_samples(limit: Limit, batches: Sequence[Batch]) -> None:
    """Raises ConfigError if there are too few samples to bound the cost of a recipe."""
    samples = sum(len(batch.lengths) for batch in batches)
    if samples < LEAST_SAMPLES:
        raise ConfigError(
            f"budget {limit}: {samples} held-out sample{'' if samples == 1 else 's'} cannot bound"
            f" what it costs: give {LEAST_SAMPLES} or more with --held-out, or a smaller --count"
        )


def check_reachable(
    model: Any,
    quantization: Quantization,
    limit: Limit,
    reference: Reference,
    steps: Steps = NOT_KEPT,
) -> None:
    """Raises ConfigError if no choice of weights can meet the limit.

    That is so if the cache alone is over it. Also raises ConfigError if there are too few samples
    to decide. Takes one forward pass, and another to report the cost of an E4M3 cache instead of
    E5M2; what `steps` have is not measured again.
    """
    check_samples(limit, reference.batches)
    kv_cache = quantization.recipe.kv_cache
    if kv_cache == "float16":
        return
    cost = _cache_alone(model, quantization, reference, steps)
    if limit.met(cost):
        return
    advice = "kv_cache: float16"
    if kv_cache == "e5m2":
        less = _cache_alone(model, quantization.with_cache("e4m3"), reference, steps)
        advice = f"kv_cache: e4m3, which alone costs {limit.show(less)}, or float16"
    few = ""
    if limit.estimate(cost) <= limit.value:
        few = f"; more held-out samples than these {cost.samples} would narrow the bound"
    raise ConfigError(
        f"budget {limit}: the {kv_cache} cache alone costs {limit.show(cost)} with every"
        f" weight in BF16: use a recipe with {advice}, or a larger budget{few}"
    )


def choose(
    model: Any,
    quantization: Quantization,
    sensitivity: Sensitivity,
    limit: Limit,
    reference: Reference,
    *,
    evaluated_on: str,
    advance: Advance = lambda tokens: None,
    steps: Steps = NOT_KEPT,
) -> Budget:
    """Promotes units greedily, to meet `limit` on the reference's batches with few bytes.

    `sensitivity` is that of `quantization`. `evaluated_on` names the text ("held-out
    samples"). `advance` receives the tokens of each pass; the number of passes is not known
    beforehand. Each measurement is kept in `steps`, which depend on the quantization and the
    reference, and is not made again. The scales of the result are `derive_scales` of its recipe.
    """
    recipe = quantization.recipe
    search = Promotion(model, quantization, sensitivity, reference, advance, steps)
    cost = sensitivity.all
    curve = [_step(search, None, None, cost, limit)]
    while not limit.met(cost):
        best = search.best()
        if best is None:  # all in BF16: the remaining cost is that of the cache
            break
        unit, level = best
        search.levels[unit.name] = level
        cost = search.measure()
        curve.append(_step(search, unit.name, level.name, cost, limit))
    promoted = [
        (unit, search.levels[unit.name]) for unit in search.units if unit.name in search.levels
    ]
    name = f"{recipe.name}-{str(limit).replace('=', '')}" if promoted else recipe.name
    return Budget(
        limit=limit,
        reached=limit.estimate(cost),
        bound=limit.bound(cost),
        met=limit.met(cost),
        curve=tuple(curve),
        chosen=tuple((unit.name, level.name) for unit, level in promoted),
        units=len(search.units),
        recipe=build_recipe(recipe, promoted, name),
        tokens=cost.tokens,
        evaluated_on=evaluated_on,
    )


def _step(
    search: Promotion, promoted: str | None, to: str | None, cost: Divergence, limit: Limit
) -> Step:
    return Step(promoted, to, search.size_bytes(), cost.kl, cost.perplexity, limit.bound(cost))


def _cache_alone(
    model: Any, quantization: Quantization, reference: Reference, steps: Steps
) -> Divergence:
    spec, kv_cache = quantization.checkpoint.spec, quantization.recipe.kv_cache

    def measure() -> Divergence:
        with simulate_modules(model, spec, {}, quantization.scales, kv_cache):
            return reference.compare()

    return steps.once(f"cache-{kv_cache}", Divergence, measure)
