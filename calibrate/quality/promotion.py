"""State of a budget's search: the promoted units, and the cost of each unit alone."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibrate.journal.steps import Steps
from calibrate.quality.divergence import Advance, Divergence, Reference
from calibrate.quality.fused_units import Unit, find_units
from calibrate.quality.precision_levels import Level, Pair, levels_above, total_bytes, weight_bytes
from calibrate.quality.sensitivity import Sensitivity
from calibrate.scales.derive import Quantization, derive_scales
from calibrate.simulate.model import Scales, simulate_modules
from octet.recipe import Recipe

__all__ = ["Promotion"]

# A promotion that adds no bytes still costs time, for instance to compute scales at run time. So
# each is charged at least this fraction of the unit's size in BF16.
_LEAST_COST = 0.02


class Promotion:
    """Promotes units to a higher format, one after another; `levels` holds the promoted ones.

    `steps` keep the measurements, numbered: each follows from those before it, whatever the limit.
    """

    def __init__(
        self,
        model: Any,
        quantization: Quantization,
        sensitivity: Sensitivity,
        reference: Reference,
        advance: Advance,
        steps: Steps,
    ) -> None:
        self._base, self._spec = quantization, quantization.checkpoint.spec
        self._recipe = quantization.recipe
        self.units = find_units(self._spec, self._recipe)
        self.levels: dict[str, Level] = {}  # by unit
        self._model, self._reference, self._advance = model, reference, advance
        self._steps, self._measured = steps, 0
        self._scales: dict[str, Scales] = {"": quantization.scales}  # by level; "" is the recipe
        self._alone = {(u.name, ""): sensitivity.kl_of(u.name) for u in self.units}

    def best(self) -> tuple[Unit, Level] | None:
        """Returns the promotion with the largest gain per byte; None if all are in BF16.

        Measures an intermediate format only if it would come first when as good as BF16.
        """
        while True:
            options = [option for unit in self.units for option in self._options(unit)]
            if not options:
                return None
            _, unit, level = max(options, key=lambda option: option[0])
            if level.pair is None or (unit.name, level.name) in self._alone:
                return unit, level
            cost = self._measure({name: level.pair for name in unit.names}, level.name, cache=False)
            self._alone[unit.name, level.name] = cost.kl

    def measure(self) -> Divergence:
        """Measures the whole model at the levels chosen so far."""
        return self._measure(self._pairs(), None, cache=True)

    def size_bytes(self) -> int:
        """Returns the size of all weights with their scales, at the levels chosen so far."""
        return total_bytes(self._spec, self._pairs())

    def _options(self, unit: Unit) -> list[tuple[float, Unit, Level]]:
        """Returns (nats per byte, unit, level) of each promotion that may reduce the divergence."""
        now = self.levels.get(unit.name)
        if now is not None and now.pair is None:
            return []
        pairs = self._pairs_of(unit)
        loss = self._alone[unit.name, now.name if now else ""]
        before = sum(weight_bytes(linear, pairs[linear.name]) for linear in unit.linears)
        found = []
        for level in levels_above(pairs[unit.names[0]]):
            left = 0.0
            if level.pair is not None:
                left = self._alone.get((unit.name, level.name), 0.0)
                if left >= loss:
                    continue
            after = sum(weight_bytes(linear, level.pair) for linear in unit.linears)
            least = _LEAST_COST * 2 * unit.weights
            found.append(((loss - left) / max(after - before, least), unit, level))
        return found

    def _pairs_of(self, unit: Unit) -> dict[str, Pair]:
        """Returns the schemes of a unit that is not in BF16."""
        level = self.levels.get(unit.name)
        found = {}
        for name in unit.names:
            pair = self._recipe.scheme_of(name) if level is None else level.pair
            assert pair is not None
            found[name] = pair
        return found

    def _pairs(self) -> dict[str, Pair]:
        """Returns the schemes of every linear that is not in BF16."""
        found: dict[str, Pair] = {}
        for unit in self.units:
            level = self.levels.get(unit.name)
            if level is None or level.pair is not None:
                found |= self._pairs_of(unit)
        return found

    def _measure(self, pairs: Mapping[str, Pair], level: str | None, *, cache: bool) -> Divergence:
        """Measures the model with those linears quantized; if `level` is None, each at its own."""
        self._measured += 1
        return self._steps.once(
            f"budget-{self._measured}", Divergence, lambda: self._compare(pairs, level, cache=cache)
        )

    def _compare(self, pairs: Mapping[str, Pair], level: str | None, *, cache: bool) -> Divergence:
        scales: dict[str, NDArray[np.float32]] = {}
        for unit in self.units:
            own = self.levels.get(unit.name)
            at = (own.name if own else "") if level is None else level
            wanted = {name for name in unit.names if name in pairs}
            if wanted:
                table = self._scales_at(at, pairs[next(iter(wanted))])
                scales |= {
                    key: value for key, value in table.items() if key.rpartition(".")[0] in wanted
                }
        kv_cache = self._recipe.kv_cache if cache else None
        if cache:
            scales |= {key: value for key, value in self._scales[""].items() if _of_cache(key)}
        weight_only = self._base.weight_only
        with simulate_modules(
            self._model, self._spec, pairs, scales, kv_cache, weight_only=weight_only
        ):
            return self._reference.compare(advance=self._advance)

    def _scales_at(self, level: str, pair: Pair) -> Scales:
        """Returns the scales of every linear at that level; derives them on first use."""
        if level not in self._scales:
            weights, activations = pair
            recipe = Recipe(
                name=level,
                weights=weights,
                activations=activations,
                kv_cache=self._recipe.kv_cache,
                exclude=self._recipe.exclude,
            )
            base = self._base
            self._scales[level] = derive_scales(base.checkpoint, recipe, base.histograms).scales
        return self._scales[level]


def _of_cache(key: str) -> bool:
    return key.endswith((".k_scale", ".v_scale"))
