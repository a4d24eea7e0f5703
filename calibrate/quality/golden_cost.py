"""Measures a recipe's cost on the golden prompts, for `rescale` and exports: no held-out text.

Every token of the prompts counts: some thousands of positions, where the golden records have one a
prompt. The prompts were held out of the calibration. Bounds are clustered by prompt, as those of
held-out text are by sample. A prompt that is a prefix of another, as when both are cut from one
sample, adds no information and is left out.

The original and the quantized model run side by side in float32, layer by layer. Only one layer and
hidden states are in memory (`_STATES_BYTES` of them at a time). The cost of each part alone is
measured on some of the prompts.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from calibrate.decoder.layers import LayeredModel
from calibrate.quality.divergence import Advance, Divergence, Tally
from calibrate.quality.fused_units import find_units
from calibrate.quality.gate import Gate, Outcome, Part
from calibrate.quality.sensitivity import CACHE
from calibrate.samples.batches import make_batches, real
from calibrate.simulate.cache import CacheRounding
from calibrate.simulate.model import (
    LayerSimulator,
    Weights,
    module_schemes,
    replace_weights,
    rounds_inputs,
)
from calibrate.simulate.scales import DeviceScales, Scales
from octet.artifacts.golden import GoldenSet
from octet.limit import LEAST_SAMPLES
from octet.model.checkpoint import Checkpoint
from octet.progress import progress_bar
from octet.recipe import KvCacheDtype, Recipe

__all__ = ["ON", "PromptCost", "check_prompts", "distinct_prompts", "judge_prompts"]

ON = "golden prompts"
_BATCH = 8  # prompts of similar length
_BLAMED_TOKENS = 2048  # of the prompts that parts are measured on, approximately
_STATES_BYTES = 512 << 20
_ROW_ELEMENTS = 1 << 24  # logits of the original, and as many of a variant, at a time


def check_prompts(gate: Gate, golden: GoldenSet) -> None:
    """Raises ConfigError if `golden` has too little text to bound the limited metrics."""
    lengths = [len(prompt) for prompt in distinct_prompts(golden)]
    gate.check_samples(lengths, ON, "calibrate again with more samples with --held-out")


def judge_prompts(gate: Gate, cost: "PromptCost", how: str, console: Console | None) -> Outcome:
    """Judges `cost` by every limit; if one is not met, adds the cost of each part alone."""
    with progress_bar(console, "Gate", cost.tokens) as advance:
        outcome = gate.judge(cost.together(advance), ON, how)
    return outcome if outcome.met else outcome.blaming(cost.parts())


@dataclass(frozen=True)
class _Variant:
    """The model with `linears` quantized, and with the KV cache quantized if `cache`."""

    linears: frozenset[str]
    cache: bool


class PromptCost:
    """Measures `recipe` with `scales` on the prompts of `golden`, against the original checkpoint.

    `kv_cache` is the cache format when served, by default the recipe's own. `weights(name)` returns
    the exported weight, float32 [N, K], or None if it follows the recipe. If `quantized` is False,
    all weights are the checkpoint's. Inputs of linears whose schemes are `weight_only` are not
    rounded (`octet.hardware.support.pattern_of`).
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        recipe: Recipe,
        scales: Scales,
        golden: GoldenSet,
        *,
        kv_cache: KvCacheDtype | None = None,
        weights: Weights | None = None,
        quantized: bool = True,
        weight_only: Collection[str] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        self._checkpoint, self._spec, self._recipe = checkpoint, checkpoint.spec, recipe
        self._device = torch.device(device)
        self._cache: KvCacheDtype = kv_cache or recipe.kv_cache
        self._schemes = module_schemes(self._spec, recipe) if quantized else {}
        self._with_inputs = rounds_inputs(self._schemes, weight_only)
        found = DeviceScales(scales, self._device)
        self._served = LayerSimulator(self._spec, self._schemes, found, weights)
        self._prompts = distinct_prompts(golden)

    @property
    def tokens(self) -> int:
        """Number of tokens in all prompts."""
        return sum(map(len, self._prompts))

    def together(self, advance: Advance = lambda tokens: None) -> Divergence:
        """Measures the whole recipe; `advance` receives `tokens` in total."""
        whole = _Variant(frozenset(self._schemes), True)
        return self._measure([whole], self._prompts, advance)[0]

    def parts(self) -> tuple[Part, ...]:
        """Measures each unit, and the cache, quantized alone, on some prompts of every length."""
        units = find_units(self._spec, self._recipe) if self._schemes else []
        named: list[tuple[str, tuple[str, ...]]] = [(unit.name, unit.names) for unit in units]
        if self._cache != "float16":
            named.append((CACHE, ()))
        variants = [_Variant(frozenset(names), not names) for _, names in named]
        prompts = _spread(self._prompts)
        size = sum(map(len, prompts)) * self._spec.hidden_size * 4
        together = max(1, _STATES_BYTES // size)
        costs: list[Divergence] = []
        for start in range(0, len(variants), together):
            costs += self._measure(variants[start : start + together], prompts, lambda tokens: None)
        return tuple(
            Part(name, linears, cost.kl, cost.kl_error)
            for (name, linears), cost in zip(named, costs, strict=True)
        )

    @torch.inference_mode()
    def _measure(
        self, variants: Sequence[_Variant], prompts: Sequence[list[int]], advance: Advance
    ) -> list[Divergence]:
        """Measures variants in one sweep; each is unquantized up to its first quantized layer."""
        batches = make_batches(prompts, [""] * len(prompts), batch_size=_BATCH)
        original = LayeredModel(self._checkpoint.unchanged(), "float32", self._device)
        before = [original.embed(batch.token_ids) for batch in batches]
        now: list[list[Tensor] | None] = [None] * len(variants)
        model, plain = original, before
        if self._checkpoint.changed:  # by an algorithm, or by folding
            model = LayeredModel(self._checkpoint, "float32", self._device)
            plain = [model.embed(batch.token_ids) for batch in batches]
        for pairs in zip(*(m.sweep() for m in dict.fromkeys((original, model))), strict=True):
            index, layer = pairs[-1]
            wanted = {name for variant in variants for name in variant.linears}
            mine = sorted(wanted & self._served.of_layer(index).keys())
            decoded = self._served.weights(layer, index, mine)
            for number, variant in enumerate(variants):
                names = variant.linears & decoded.keys()
                states = now[number]
                if states is None and not names and not variant.cache:
                    continue
                weights = {name: decoded[name] for name in names}
                with self._layer_with(layer, index, weights, cache=variant.cache):
                    now[number] = [model.forward(x, None) for x in states or plain]
            with self._layer_with(layer, index, {}, cache=False):
                plain = [model.forward(x, None) for x in plain]
            before = plain
            if model is not original:
                with self._layer_with(pairs[0][1], index, {}, cache=False):
                    before = [original.forward(x, None) for x in before]
        found = [Tally() for _ in variants]
        for number, batch in enumerate(batches):
            for tally, states in zip(found, now, strict=True):
                rows = (real(x[number], batch) for x in (before, states or plain))
                tally.add(batch, _logits(original, model, *rows))
            advance(batch.tokens)
        return [tally.divergence() for tally in found]

    @contextmanager
    def _layer_with(
        self, layer: Any, index: int, weights: Mapping[str, Tensor], *, cache: bool
    ) -> Iterator[None]:
        """While active, the layer uses `weights` and rounds the activations of those linears."""
        rounding = None
        if cache:
            rounding = CacheRounding(self._cache, own=self._cache == self._recipe.kv_cache)
        inputs = {name: pair for name, pair in self._with_inputs.items() if name in weights}
        with (
            replace_weights(layer, self._spec.layer(index), self._spec, weights),
            self._served.rounding(layer, index, inputs, rounding),
        ):
            yield


def _logits(
    original: LayeredModel, model: LayeredModel, before: Tensor, now: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields both models' logits for last hidden states [n, H], in chunks of rows."""
    step = max(1, _ROW_ELEMENTS // original.spec.vocab_size)
    for start in range(0, len(now), step):
        part = slice(start, start + step)
        yield original.logits([before[None, part]])[0][0], model.logits([now[None, part]])[0][0]


def distinct_prompts(golden: GoldenSet) -> list[list[int]]:
    """Returns the token ids of the prompts that are text, and not a prefix of another."""
    ordered = sorted({record.prompt_token_ids for record in golden.texts})
    following = [*ordered[1:], ()]  # a prompt directly precedes those that extend it
    pairs = zip(ordered, following, strict=True)
    return [list(ids) for ids, after in pairs if after[: len(ids)] != ids]


def _spread(prompts: Sequence[list[int]]) -> list[list[int]]:
    """Chooses prompts evenly by length, with about `_BLAMED_TOKENS` tokens together."""
    ordered = sorted(prompts, key=len)
    average = max(1, sum(map(len, ordered)) // len(ordered))
    count = min(len(ordered), max(LEAST_SAMPLES, _BLAMED_TOKENS // average))
    at = np.linspace(0, len(ordered) - 1, count).round().astype(int)
    return [ordered[index] for index in sorted(set(at.tolist()))]
