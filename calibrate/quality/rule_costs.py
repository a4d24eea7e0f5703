"""Measures the next-token divergence that each rule of scaling causes on each domain.

The model runs with its activations (and an E4M3 cache) rounded at each step's scales, and is
compared with itself without rounding: weights stay as they are, so the figure is that of activation
scaling alone. The scales are those of the unrounded activations, as the histograms have them.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from calibrate.decoder.loading import ComputeDtype, load_model
from calibrate.quality.divergence import Reference
from calibrate.samples.batches import Batch, real
from calibrate.scales.derive import replace_scales
from calibrate.scales.over_time import RULES, Rule
from calibrate.simulate.cache import CacheRounding, round_attention
from calibrate.simulate.model import module_schemes, round_inputs
from calibrate.simulate.scales import DeviceScales
from octet.artifacts.calibration import Calibration
from octet.model.checkpoint import Checkpoint

__all__ = ["MeanKl", "RuleCosts"]


@dataclass
class MeanKl:
    """A mean KL divergence per token, in nats, over samples that are added as they come.

    Holds sums alone. The standard error is that of `calibrate.quality.divergence`, by samples.
    """

    samples: int = 0
    kl: float = 0.0
    tokens: float = 0.0
    kl_squared: float = 0.0
    kl_tokens: float = 0.0
    tokens_squared: float = 0.0

    def add(self, kl: NDArray[np.float64], tokens: NDArray[np.float64]) -> None:
        """Adds the sums of some samples, [n], and their numbers of tokens, [n]."""
        self.samples += len(kl)
        self.kl += float(kl.sum())
        self.tokens += float(tokens.sum())
        self.kl_squared += float(kl @ kl)
        self.kl_tokens += float(kl @ tokens)
        self.tokens_squared += float(tokens @ tokens)

    @property
    def mean(self) -> float:
        return self.kl / self.tokens

    @property
    def error(self) -> float | None:
        """The standard error; None with a single sample."""
        if self.samples < 2:
            return None
        residuals = self.kl_squared - 2 * self.mean * self.kl_tokens
        residuals += self.mean**2 * self.tokens_squared
        return math.sqrt(max(0.0, residuals) * self.samples / (self.samples - 1)) / self.tokens


class RuleCosts:
    """Measures with the calibrated model, in memory, what each rule costs on each domain.

    `checkpoint` has the calibration's changed weights. `found` has the costs so far.
    """

    def __init__(
        self, checkpoint: Checkpoint, origin: Calibration, dtype: ComputeDtype, device: torch.device
    ) -> None:
        recipe, self._spec = origin.manifest.recipe, checkpoint.spec
        schemes = module_schemes(checkpoint.spec, recipe)
        self._schemes = {name: pair for name, pair in schemes.items() if not pair[1].dynamic}
        self._cache = CacheRounding(recipe.kv_cache) if recipe.kv_cache == "e4m3" else None
        self._origin = origin
        self._model = load_model(checkpoint, dtype).to(device)
        self.found: dict[tuple[str, Rule], MeanKl] = {}

    def add(
        self,
        domains: Sequence[str],
        batches: Sequence[Batch],
        scales: Sequence[Mapping[Rule, Mapping[str, float]]],
    ) -> None:
        """Adds steps, each of a domain and in a batch, with their scales by rule and observation.

        Raises NumericsError if a logit is NaN or Inf.
        """
        reference = Reference(self._model, self._spec, batches)
        for rule in RULES:

            def states(index: int, rule: Rule = rule) -> Tensor:
                batch = batches[index]
                with self._rounding(scales[index][rule]):
                    return real(reference.states(batch), batch)

            sums = reference.tally(states=states).sums()
            start = 0
            for domain, batch in zip(domains, batches, strict=True):
                part = slice(start, start + len(batch.lengths))
                mean = self.found.setdefault((domain, rule), MeanKl())
                mean.add(sums.kl[part], sums.tokens[part])
                start = part.stop

    def _rounding(self, scales: Mapping[str, float]) -> ExitStack:
        """Returns a context in which the model rounds its activations at `scales`."""
        origin, spec = self._origin, self._spec
        replaced = replace_scales(origin.observations, origin.scales, scales)
        found = DeviceScales(replaced, self._model.device)
        with ExitStack() as stack:
            for index in range(spec.layers):
                prefix = spec.layer(index)
                layer = self._model.get_submodule(prefix)
                mine = {n: s for n, s in self._schemes.items() if n.startswith(f"{prefix}.")}
                stack.enter_context(round_inputs(layer, index, spec, mine, found))
                if self._cache is not None:
                    stack.enter_context(round_attention(layer, prefix, self._cache, found))
            return stack.pop_all()
