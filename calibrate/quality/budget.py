"""Which parts of a model to keep in a better format so that quantization costs no more than said.

It starts with the recipe everywhere. While that is over budget, one unit goes up a format, or to
BF16: the one with the most divergence to gain per byte, by what each costs alone; then the whole is
measured again. What it costs, in forward passes over the batches: one at each step, and one more
where a format between the recipe's and BF16 is considered for a unit.

A limit is held against the upper end of a one-sided 95 % confidence interval, not against the
estimate. The interval is that of a recipe fixed beforehand; here, which units are promoted and when
to stop is decided on the same text, so what is reached at the end is somewhat optimistic, the more
so the fewer samples there are. `LEAST_SAMPLES` are required.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from calibrate.observe.histogram import Histogram
from calibrate.quality.divergence import LEAST_SAMPLES, Advance, Divergence, Reference
from calibrate.quality.limit import Limit
from calibrate.quality.precision_levels import build_recipe
from calibrate.quality.promotion import Promotion
from calibrate.quality.sensitivity import Sensitivity
from calibrate.samples.batches import Batch
from calibrate.scales.derive import kv_scales
from calibrate.simulate.model import Scales, simulate_modules
from octet.errors import ConfigError
from octet.model.checkpoint import Checkpoint
from octet.recipe import Recipe

__all__ = ["Budget", "Limit", "Step", "check_reachable", "check_samples", "choose"]


@dataclass(frozen=True)
class Step:
    """The whole model after `promoted` went `to` a format; None in the first, the recipe itself."""

    promoted: str | None
    to: str | None
    weight_bytes: int  # of all weights with their scales
    kl: float
    perplexity: float
    bound: float  # of the limited metric


@dataclass(frozen=True)
class Budget:
    """A recipe that costs no more than `limit`, and how it was found.

    `reached` and `bound` are of the limited metric at the end; `chosen` are the units that are not
    as the first recipe said, with their formats, in the order of the model.
    """

    limit: Limit
    reached: float
    bound: float
    met: bool
    curve: tuple[Step, ...]
    chosen: tuple[tuple[str, str], ...]
    recipe: Recipe
    tokens: int
    evaluated_on: str

    def as_json(self) -> dict[str, Any]:
        """Plain data for report.json."""
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
        }


def check_samples(limit: Limit, batches: Sequence[Batch]) -> None:
    """ConfigError if there are too few samples to bound what a recipe costs."""
    samples = sum(len(batch.lengths) for batch in batches)
    if samples < LEAST_SAMPLES:
        raise ConfigError(
            f"budget {limit}: {samples} held-out sample{'' if samples == 1 else 's'} cannot bound"
            f" what it costs: give {LEAST_SAMPLES} or more with --held-out, or a smaller --count"
        )


def check_reachable(
    model: Any,
    checkpoint: Checkpoint,
    recipe: Recipe,
    histograms: Mapping[str, Histogram],
    limit: Limit,
    reference: Reference,
) -> None:
    """ConfigError if the cache alone is over the limit, so that no choice of weights can meet it,
    and if there are too few samples to tell.

    One forward pass, and one more to say what an E4M3 cache would cost instead.
    """
    check_samples(limit, reference.batches)
    if recipe.kv_cache == "float16":
        return
    cost = _cache_alone(model, checkpoint, recipe, histograms, reference)
    if limit.met(cost):
        return
    advice = "kv_cache: float16"
    if recipe.kv_cache == "e5m2":
        other = recipe.model_copy(update={"kv_cache": "e4m3"})
        less = _cache_alone(model, checkpoint, other, histograms, reference)
        advice = f"kv_cache: e4m3, which alone costs {limit.show(less)}, or float16"
    few = ""
    if limit.estimate(cost) <= limit.value:
        few = f"; more held-out samples than these {cost.samples} would narrow the bound"
    raise ConfigError(
        f"budget {limit}: the {recipe.kv_cache} cache alone costs {limit.show(cost)} with every"
        f" weight in BF16: use a recipe with {advice}, or a larger budget{few}"
    )


def choose(
    model: Any,
    checkpoint: Checkpoint,
    recipe: Recipe,
    scales: Scales,
    histograms: Mapping[str, Histogram],
    sensitivity: Sensitivity,
    limit: Limit,
    reference: Reference,
    *,
    evaluated_on: str,
    advance: Advance = lambda tokens: None,
) -> Budget:
    """The recipe of fewest bytes, by greedy promotion, within `limit` on the reference's batches.

    `scales` and `sensitivity` are those of `recipe`. `evaluated_on` says whose tokens they are
    ("held-out samples"). `advance` is told the tokens of each pass; how many there will be is not
    known beforehand. The scales of the result are `derive_scales` of its recipe.
    """
    search = Promotion(
        model, checkpoint, recipe, scales, histograms, sensitivity, reference, advance
    )
    cost = sensitivity.all
    curve = [_step(search, None, None, cost, limit)]
    while not limit.met(cost):
        best = search.best()
        if best is None:  # all in BF16: what is left is the cache's
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
        recipe=build_recipe(checkpoint.spec, recipe, promoted, name),
        tokens=cost.tokens,
        evaluated_on=evaluated_on,
    )


def _step(
    search: Promotion, promoted: str | None, to: str | None, cost: Divergence, limit: Limit
) -> Step:
    return Step(promoted, to, search.size_bytes(), cost.kl, cost.perplexity, limit.bound(cost))


def _cache_alone(
    model: Any,
    checkpoint: Checkpoint,
    recipe: Recipe,
    histograms: Mapping[str, Histogram],
    reference: Reference,
) -> Divergence:
    scales = kv_scales(checkpoint, recipe, histograms)
    with simulate_modules(model, checkpoint.spec, {}, scales, recipe.kv_cache):
        return reference.compare()
