"""What a recipe is expected to cost on the golden prompts, for each way in which it is served.

Every path is simulated layer by layer: weights are decoded once a layer and shared by all paths,
and in memory are one layer, in each dtype that is computed in, and the hidden states of the prompts
(`_STATES_BYTES` of them at a time). What is compared is what an API returns: the 20 likeliest
tokens. The range around a mean: `calibrate.scatter`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from calibrate.batches import Batch, make_batches
from calibrate.layers import LayeredModel
from calibrate.loading import ComputeDtype
from calibrate.progress import Spread, progress_bar
from calibrate.scatter import expectations
from calibrate.simulate import (
    Schemes,
    decoded_weights,
    layer_weights,
    module_schemes,
    replace_weights,
    round_inputs,
)
from calibrate.simulate_cache import CacheRounding, round_attention
from calibrate.simulate_scales import DeviceScales, Scales
from octet.checkpoint import Checkpoint
from octet.expected import ExpectedSet, ServingPath
from octet.golden import GoldenSet, top_k_divergence
from octet.recipe import KvCacheDtype, Recipe

__all__ = ["REPEATS", "Weights", "expected_divergence", "predict", "serving_paths"]

REPEATS = 2
_TOKENS = {"cpu": 512, "cuda": 8192}  # in a batch: what stays in a cache, what fills a GPU
_STATES_BYTES = 512 << 20  # hidden states in memory at a time
_UNIT = {"float32": 2.0**-23, "bfloat16": 2.0**-7}  # what embeddings differ by between repeats

# weights(name) -> float32 [N, K], decoded from what was written; None: as the recipe says
Weights = Callable[[str], NDArray[np.float32] | None]


def serving_paths(recipe: Recipe) -> tuple[ServingPath, ...]:
    """The paths that engines take with `recipe`: see `octet.engines` and `docs/compatibility.md`.

    With the recipe's own cache and with every other that an export may choose. Engines on a GPU and
    TensorRT compute in bfloat16 or better, ONNX Runtime in float32; vLLM on a CPU truncates into an
    FP8 cache; FlashAttention 3 rounds queries too where the cache is E4M3. Weight-only products are
    those of FP4 and MX formats on Hopper; of FP8 on GPUs before it, with the recipe's own cache.
    """
    fp8 = recipe.weights.kind == "fp8"
    caches: tuple[KvCacheDtype, ...] = tuple(
        dict.fromkeys((recipe.kv_cache, "e5m2", "float16", "e4m3"))
    )
    paths = []
    for cache in caches:
        weight_only = not fp8 or cache == recipe.kv_cache
        for queries in (True, False) if cache == "e4m3" else (False,):
            paths.append(ServingPath(kv_cache=cache, queries=queries))
            if weight_only:
                paths.append(ServingPath(kv_cache=cache, queries=queries, activations=False))
        if cache != "float16":
            paths.append(ServingPath(kv_cache=cache, kv_rounding="truncate"))
        paths.append(ServingPath(kv_cache=cache, compute="float32"))
    return tuple(paths)


def predict(
    checkpoint: Checkpoint,
    recipe: Recipe,
    scales: Scales,
    golden: GoldenSet,
    paths: Sequence[ServingPath] | None = None,
    *,
    weights: Weights | None = None,
    device: torch.device | str = "cpu",
    advance: Callable[[int], None] = lambda tokens: None,
) -> ExpectedSet:
    """What each of `paths` (`serving_paths`, if not given) is expected to cost.

    `scales` are those of a calibration. `weights` puts those of an export in their place.
    `advance` is told tokens as work is done, which add up to those of the golden prompts.
    KeyError names a scale that is missing.
    """
    chosen = tuple(serving_paths(recipe) if paths is None else paths)
    sequences = [record.prompt_token_ids for record in golden.records]
    batches = _batches(sequences, _TOKENS.get(torch.device(device).type, _TOKENS["cuda"]))
    sweeps = list(_sweeps(chosen, batches, checkpoint.spec.hidden_size))
    total = sum(map(len, sequences))
    progress = Spread(advance, total, len(chosen) * checkpoint.spec.layers)
    found: dict[ServingPath, NDArray[np.float64]] = {}
    for together in sweeps:
        sweep = _Sweep(checkpoint, recipe, scales, weights, together, batches, device)
        sweep.run(progress)
        for path in together:
            found[path] = sweep.divergences(path, golden)
    return ExpectedSet(recipe=recipe.name, expectations=tuple(expectations(found)))


def expected_divergence(
    checkpoint: Checkpoint,
    recipe: Recipe,
    scales: Scales,
    golden: GoldenSet,
    *,
    device: torch.device | str = "cpu",
    console: Console | None = None,
) -> ExpectedSet | None:
    """`predict` for every path, with a progress bar.

    None for an architecture that Octet does not know: where its attention is, it does not either.
    """
    if checkpoint.spec.generic:
        return None
    tokens = sum(len(record.prompt_token_ids) for record in golden.records)
    with progress_bar(console, "Expected divergence", tokens) as advance:
        return predict(checkpoint, recipe, scales, golden, device=device, advance=advance)


def _batches(sequences: Sequence[Sequence[int]], most: int) -> list[Batch]:
    """Of similar lengths, at most so many tokens together; the origin of a row is its number."""
    found: list[Batch] = []
    part: list[int] = []
    for number in [*sorted(range(len(sequences)), key=lambda n: len(sequences[n])), None]:
        if part and (number is None or len(sequences[number]) * (len(part) + 1) > most):
            rows = [sequences[n] for n in part]
            found += make_batches(rows, [str(n) for n in part], batch_size=len(part))
            part = []
        if number is not None:
            part.append(number)
    return found


def _sweeps(
    paths: Sequence[ServingPath], batches: Sequence[Batch], hidden: int
) -> Iterator[list[ServingPath]]:
    """Paths whose hidden states fit in `_STATES_BYTES` together, or are of one."""
    tokens = sum(batch.token_ids.numel() for batch in batches)
    part: list[ServingPath] = []
    used = 0
    for path in paths:
        size = REPEATS * tokens * hidden * getattr(torch, path.compute).itemsize
        if part and used + size > _STATES_BYTES:
            yield part
            part, used = [], 0
        part.append(path)
        used += size
    if part:
        yield part


@dataclass
class _Run:
    """One path, once: its hidden states [B, T, H] of each batch, after the layers so far."""

    path: ServingPath
    states: list[Tensor]


class _Sweep:
    """Some paths through all layers together."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        recipe: Recipe,
        scales: Scales,
        weights: Weights | None,
        paths: Sequence[ServingPath],
        batches: Sequence[Batch],
        device: torch.device | str,
    ) -> None:
        self._spec, self._recipe, self._paths = checkpoint.spec, recipe, paths
        self._scales = DeviceScales(scales, torch.device(device))
        self._given, self._batches = weights, batches
        self._schemes = module_schemes(self._spec, recipe)
        dtypes: dict[ComputeDtype, None] = dict.fromkeys(path.compute for path in paths)
        self._models = {dtype: LayeredModel(checkpoint, dtype, device) for dtype in dtypes}
        self._runs = [_Run(path, self._embed(path, n)) for path in paths for n in range(REPEATS)]

    def run(self, progress: Spread) -> None:
        """Layer by layer."""
        names, models = list(self._models), list(self._models.values())
        with models[0].few_threads():
            self._run(names, models, progress)

    def _run(
        self, names: Sequence[ComputeDtype], models: Sequence[LayeredModel], progress: Spread
    ) -> None:
        for pairs in zip(*(model.sweep() for model in models), strict=True):
            index = pairs[0][0]
            layers = {name: layer for name, (_, layer) in zip(names, pairs, strict=True)}
            prefix = self._spec.layer(index)
            mine = {n: pair for n, pair in self._schemes.items() if n.startswith(f"{prefix}.")}
            weights = self._weights(next(iter(layers.values())), prefix, mine)
            for dtype, layer in layers.items():
                for quantized in (False, True):
                    runs = [
                        run
                        for run in self._runs
                        if run.path.compute == dtype and run.path.weights == quantized
                    ]
                    if not runs:
                        continue
                    with replace_weights(layer, prefix, self._spec, weights if quantized else {}):
                        for run in runs:
                            self._through(layer, index, mine, run)
            progress.step(len(self._paths))

    def divergences(self, path: ServingPath, golden: GoldenSet) -> NDArray[np.float64]:
        """float64 [REPEATS, prompts], in nats, in the order of the golden records."""
        found = []
        for run in self._runs:
            if run.path != path:
                continue
            last = torch.cat(
                [
                    states[torch.arange(len(batch.lengths)), torch.tensor(batch.lengths) - 1]
                    for states, batch in zip(run.states, self._batches, strict=True)
                ]
            )
            logits = self._models[path.compute].logits([last[None]])[0][0]
            order = [int(origin) for batch in self._batches for origin in batch.origins]
            row = np.empty(len(order))
            for number, logit in zip(order, logits, strict=True):
                row[number] = _divergence(golden, number, logit)
            found.append(row)
        return np.array(found)

    def _weights(self, layer: Any, prefix: str, schemes: Schemes) -> dict[str, Tensor]:
        """float32, of the quantized linears of a layer, decoded; {} if no path has any."""
        if not any(path.weights for path in self._paths):
            return {}
        given = {name: self._given(name) for name in schemes} if self._given is not None else {}
        found = {
            name: torch.from_numpy(np.asarray(weight, np.float32)).to(self._scales.device)
            for name, weight in given.items()
            if weight is not None
        }
        left = {name: pair for name, pair in schemes.items() if name not in found}
        for name, own in layer_weights(layer, prefix, self._spec, left).items():
            found |= decoded_weights({name: own.float()}, left, self._scales)
        return found

    def _through(self, layer: Any, index: int, schemes: Schemes, run: _Run) -> None:
        model, path = self._models[run.path.compute], run.path
        with self._rounding(layer, index, schemes, path):
            for number, states in enumerate(run.states):
                run.states[number] = model.forward(states, None)

    @contextmanager
    def _rounding(
        self, layer: Any, index: int, schemes: Schemes, path: ServingPath
    ) -> Iterator[None]:
        rounding = CacheRounding(
            path.kv_cache,
            toward_zero=path.kv_rounding == "truncate",
            queries=path.queries,
            own=path.kv_cache == self._recipe.kv_cache,
        )
        rounded = schemes if path.activations else {}
        with ExitStack() as stack:
            stack.enter_context(round_inputs(layer, index, self._spec, rounded, self._scales))
            prefix = self._spec.layer(index)
            stack.enter_context(round_attention(layer, prefix, rounding, self._scales))
            yield

    def _embed(self, path: ServingPath, repeat: int) -> list[Tensor]:
        """The embeddings of each batch [B, T, H]; but for the first repeat, a last bit off."""
        model = self._models[path.compute]
        source = torch.Generator().manual_seed(repeat)
        found = []
        for batch in self._batches:
            states = model.embed(batch.token_ids)
            if repeat:
                noise = 2 * torch.rand(states.shape, generator=source).to(states.device) - 1
                states = (states.float() * (1 + noise * _UNIT[path.compute])).to(states.dtype)
            found.append(states)
        return found


def _divergence(golden: GoldenSet, number: int, logits: Tensor) -> float:
    """What an API that returns as many log-probabilities as the record holds would show."""
    record = golden.records[number]
    logprobs = logits.double().log_softmax(-1).cpu()
    top = logprobs.topk(len(record.top))
    served = dict(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    return top_k_divergence(record.top, served)
