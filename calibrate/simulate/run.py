"""Simulates all scenarios together, layer by layer, on golden prompts and their continuations.

Weights are dequantized once per layer and shared by all scenarios. In memory are one layer, in each
compute dtype, and as many hidden states as fit. A sequence is a prompt and the first POSITIONS - 1
tokens of the reference's continuation, so that one pass gives every position at which a server is
compared. Attention is causal, so the first position depends on the prompt alone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from calibrate.decoder.layers import LayeredModel
from calibrate.decoder.loading import ComputeDtype
from calibrate.decoder.weights import LayerWeights, free_memory
from calibrate.samples.batches import golden_batches
from calibrate.simulate.faults import (
    TakenScales,
    as_fused,
    cache_rounding,
    changes_weights,
    faulty_theta,
    faulty_weights,
)
from calibrate.simulate.model import (
    LayerSimulator,
    Weights,
    module_schemes,
    replace_weights,
    rounded_inputs,
    with_power_scales,
)
from calibrate.simulate.packed import Pack, packs
from calibrate.simulate.scales import DeviceScales, Scales
from calibrate.simulate.schedule import Run, fault_records, planned
from octet.artifacts.golden import GoldenSet
from octet.artifacts.scenarios import Scenario
from octet.model.checkpoint import Checkpoint
from octet.progress import Spread
from octet.recipe import Recipe

__all__ = ["Answers", "Weights", "simulated"]

_TOKENS = {"cpu": 512, "cuda": 16384}  # per batch: fits in a CPU cache, fills a GPU
_TOGETHER = 2  # a packed row, without padding, holds this many batches' worth
_STATES_BYTES = 512 << 20  # of hidden states at a time on a CPU
_WORKING = 0.5  # share of a GPU's free memory that is left to other things than hidden states


@dataclass
class Answers:
    """Last hidden states of one run of a scenario at the positions of its records.

    Row i of `hidden` [n, H] is of record `records[i]` at position `positions[i]`.
    """

    scenario: Scenario
    hidden: Tensor
    records: NDArray[np.int64]
    positions: NDArray[np.int64]
    model: LayeredModel = field(repr=False)


def simulated(
    checkpoint: Checkpoint,
    recipe: Recipe,
    scales: Scales,
    golden: GoldenSet,
    chosen: Sequence[Scenario],
    *,
    weights: Weights | None = None,
    device: torch.device | str = "cpu",
    layers: LayerWeights | None = None,
    advance: Callable[[int], None] = lambda tokens: None,
) -> Iterator[list[Answers]]:
    """Yields the answers of `chosen`, some scenarios at a time, with all runs of each.

    `advance` receives token counts as work progresses; they add up to the tokens of the golden
    prompts.
    """
    layers = layers or LayerWeights(checkpoint, device)
    bench = _Bench(layers, recipe, scales, golden, weights)
    plans = list(planned(chosen, bench.nbytes, bench.room))
    steps = sum(checkpoint.spec.layers - run.start for plan in plans for run in plan)
    total = sum(len(record.prompt_token_ids) for record in golden.records)
    progress = Spread(advance, total, steps)
    for plan in plans:
        yield layers.run(partial(bench.answers, plan, progress))


class _Bench:
    """State shared by all sweeps: packs of records, models, scales."""

    def __init__(
        self,
        layers: LayerWeights,
        recipe: Recipe,
        scales: Scales,
        golden: GoldenSet,
        weights: Weights | None,
    ) -> None:
        device = layers.device
        self._layers, self._spec, self._recipe = layers, layers.checkpoint.spec, recipe
        self._taken = TakenScales(scales, recipe, device)
        schemes = module_schemes(self._spec, recipe)
        self._served = LayerSimulator(self._spec, schemes, DeviceScales(scales, device), weights)
        self._models: dict[ComputeDtype, LayeredModel] = {}
        self._golden = golden
        few = fault_records(golden)
        rest = sorted(set(range(len(golden.records))) - set(few))
        most = _TOKENS.get(device.type, _TOKENS["cuda"])
        together, padded = most * _TOGETHER, self._spec.generic
        self._fault_packs, others = (
            packs(golden_batches(golden, part, most), golden, together, device, padded=padded)
            for part in (few, rest)
        )
        # `_fault_packs` are of the records that faults are simulated on.
        self._packs = self._fault_packs + others

    @property
    def room(self) -> int:
        """Number of bytes for the hidden states of all runs of a sweep."""
        if self._layers.device.type != "cuda":
            return _STATES_BYTES
        return int((1 - _WORKING) * free_memory(self._layers.device))

    def nbytes(self, run: Run) -> int:
        """Returns the size of the run's hidden states."""
        tokens = sum(pack.tokens for pack in self._packs_of(run))
        itemsize: int = getattr(torch, run.scenario.path.compute).itemsize
        return tokens * self._spec.hidden_size * itemsize

    def answers(self, runs: Sequence[Run], progress: Spread) -> list[Answers]:
        """Runs `runs` through all layers, one layer at a time."""
        names: list[ComputeDtype] = list(dict.fromkeys(x.scenario.path.compute for x in runs))
        models = [self._model(name) for name in names]
        self._start_at_embeddings(runs)
        for pairs in zip(*(model.sweep() for model in models), strict=True):
            index = pairs[0][0]
            layers = {name: layer for name, (_, layer) in zip(names, pairs, strict=True)}
            self._start_at_layer(runs, index)
            started = [run for run in runs if run.start <= index]
            self._layer(index, layers, started)
            progress.step(len(started))
        return [self._answers(run) for run in runs if not run.carrier]

    def _answers(self, run: Run) -> Answers:
        """Returns the answers of a finished run at the positions of its records."""
        records, positions = (
            np.concatenate(found)
            for found in zip(
                *((pack.records, pack.at) for pack in self._packs_of(run)), strict=True
            )
        )
        model = self._model(run.scenario.path.compute)
        return Answers(run.scenario, torch.cat(run.states, 1)[0], records, positions, model)

    def _packs_of(self, run: Run) -> list[Pack]:
        return self._packs if run.whole else self._fault_packs

    def _start_at_embeddings(self, runs: Sequence[Run]) -> None:
        """Gives embeddings to runs that start at the first layer; equal embeddings are shared."""
        made: dict[tuple[Any, ...], list[Tensor]] = {}
        for run in runs:
            key = (run.scenario.path.compute, run.repeat, run.whole)
            if run.start == 0:
                run.states = made[key] = made.get(key) or self._embed(run)

    def _start_at_layer(self, runs: Sequence[Run], index: int) -> None:
        """Gives runs that start at layer `index` the hidden states of their fault-free path."""
        for run in runs:
            if run.start == index and index:
                path = Scenario(path=run.scenario.path)
                conforming = next(x for x in runs if x.scenario == path and x.repeat == 0)
                run.states = conforming.states[: len(self._fault_packs)]

    def _layer(self, index: int, layers: dict[ComputeDtype, Any], runs: Sequence[Run]) -> None:
        """Runs one layer for all `runs`; `layers` has its module in each compute dtype."""
        prefix = self._spec.layer(index)
        schemes = self._served.of_layer(index)
        decoded: dict[str, Tensor] = {}
        if any(run.scenario.path.weights for run in runs):
            decoded = self._served.weights(next(iter(layers.values())), index, schemes)
        fused = as_fused(decoded, schemes, self._served.scales, self._spec)
        # Runs that use the same weights, in the same dtype, run one after another.
        groups: dict[tuple[Any, ...], list[Run]] = {}
        for run in runs:
            scenario = run.scenario
            faulty = scenario.fault if changes_weights(scenario, index) else None
            path = scenario.path
            key = (path.compute, path.weights, path.power_scales, faulty)
            groups.setdefault(key, []).append(run)
        for (dtype, quantized, power_scales, faulty), group in groups.items():
            weights = fused if quantized else {}
            if faulty is not None:
                scenario = group[0].scenario
                weights = faulty_weights(
                    decoded, schemes, self._served.scales, self._spec, scenario
                )
            if power_scales:
                weights = with_power_scales(weights, schemes)
            layer = layers[dtype]
            model = self._model(dtype)
            factors = self._served.factors(weights) if dtype == "float32" else {}
            with replace_weights(layer, prefix, self._spec, weights, factors):
                for run in group:
                    rounded = rounded_inputs(schemes, run.scenario.path)
                    cache = cache_rounding(run.scenario, self._recipe)
                    scales = self._taken.of(run.scenario)
                    theta = faulty_theta(self._spec, run.scenario)
                    with (
                        self._served.rounding(layer, index, rounded, cache, scales),
                        nullcontext() if theta is None else model.unscaled_rope(theta),
                    ):
                        run.states = [
                            pack.finish(model, layer, states)
                            if index == self._spec.layers - 1
                            else pack.forward(model, layer, states)
                            for pack, states in zip(self._packs_of(run), run.states, strict=True)
                        ]

    def _model(self, dtype: ComputeDtype) -> LayeredModel:
        if dtype not in self._models:
            checkpoint, device = self._layers.checkpoint, self._layers.device
            self._models[dtype] = LayeredModel(checkpoint, dtype, device, self._layers)
        return self._models[dtype]

    def _embed(self, run: Run) -> list[Tensor]:
        """Returns each pack's embeddings [1, n, H]; later repeats differ in the last bit."""
        model = self._model(run.scenario.path.compute)
        noise = torch.Generator().manual_seed(run.repeat) if run.repeat else None
        return [pack.embed(model, noise) for pack in self._packs_of(run)]
