"""Measures the cost of quantizing each part of a model alone.

The divergence of the next-token distributions gives the cost; the signal-to-noise ratios explain
it. The ratio of a whole activation tensor can be high while nearly all of it is lost: a few massive
activations carry the energy, and a scale that covers them leaves no codes for the rest. So the
small values, those up to `Histogram.small_limit` of the calibration, have a ratio of their own.

Time, in forward passes over the batches: every unit starts at its own layer, from the reference's
hidden states there, so the four units of each of L layers (three with experts) cost 2(L + 1). Four
more passes are for those hidden states, the embeddings, the cache, and all parts together.
Memory: one set of hidden states [tokens, H], and a copy of the unit's weights.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding

from calibrate.decoder.arithmetic import linear
from calibrate.decoder.partial import Tail
from calibrate.decoder.rounding import fake_quantize
from calibrate.journal.steps import NOT_KEPT, Steps
from calibrate.observe.histogram import SMALL
from calibrate.quality.divergence import Advance, Divergence, Reference
from calibrate.quality.fused_units import Unit, find_units, format_label, unit_weights
from calibrate.quality.sqnr import Noise
from calibrate.scales.derive import Quantization
from calibrate.scales.weights import scale_of_weight
from calibrate.simulate.model import module_schemes, simulate, simulate_modules
from octet.model.checkpoint import Checkpoint
from octet.numerics.formats import FORMATS
from octet.numerics.microscaling import global_scale
from octet.numerics.scaling import scale_from_absmax
from octet.recipe import TensorScheme

__all__ = [
    "CACHE",
    "Sensitivity",
    "UnitSensitivity",
    "measure_sensitivity",
    "measurements",
]

EMBEDDINGS, HEAD, CACHE = "model.embed_tokens", "lm_head", "kv_cache"
_ALL = "all"  # the step that measures everything together


@dataclass(frozen=True)
class UnitSensitivity:
    """One unit quantized alone; ratios are in dB, None without error or without signal.

    `kl` is in nats, with its standard error. `linears` and `weights` (a count) are () and 0 for the
    cache. Embeddings have no activations to round; experts' outputs are taken before their sum.
    """

    name: str
    linears: tuple[str, ...]
    weights: int
    format: str
    kl: float
    kl_error: float
    input_sqnr_db: float | None
    input_small_sqnr_db: float | None
    weight_sqnr_db: float | None
    output_sqnr_db: float | None


@dataclass(frozen=True)
class Sensitivity:
    """Cost of every unit alone, and of `all` together (without embeddings and head)."""

    all: Divergence
    units: tuple[UnitSensitivity, ...]

    def kl_of(self, name: str) -> float:
        """Returns the divergence with only that unit quantized."""
        return next(unit.kl for unit in self.units if unit.name == name)

    def as_json(self) -> dict[str, Any]:
        """Returns plain data for report.json."""
        return {
            "samples": self.all.samples,
            "tokens": self.all.tokens,
            "small_quantile": SMALL,
            "reference_perplexity": self.all.reference_perplexity,
            "all": {
                "kl": self.all.kl,
                "kl_error": self.all.kl_error,
                "perplexity": self.all.perplexity,
            },
            "units": [asdict(unit) | {"linears": list(unit.linears)} for unit in self.units],
        }


def measurements(quantization: Quantization) -> int:
    """Returns how often `measure_sensitivity` passes all tokens of the reference to `advance`."""
    units = find_units(quantization.checkpoint.spec, quantization.recipe)
    return len(units) + 3 + (quantization.recipe.kv_cache != "float16")


@torch.no_grad()
def measure_sensitivity(
    model: Any,
    quantization: Quantization,
    reference: Reference,
    *,
    advance: Advance = lambda tokens: None,
    steps: Steps = NOT_KEPT,
) -> Sensitivity:
    """Measures every unit that the recipe quantizes, the cache, the embeddings and the head.

    Uses the reference's batches. The result is in the order of execution, with the cache last. Each
    measurement is kept in `steps`, which depend on the quantization and the reference, and is not
    made again.
    """
    checkpoint, recipe, scales = quantization.checkpoint, quantization.recipe, quantization.scales
    spec, weight_only = checkpoint.spec, quantization.weight_only
    small = {name: histogram.small_limit() for name, histogram in quantization.histograms.items()}
    tail = Tail(model, spec, reference.batches)

    def compare(noise: Noise) -> Divergence:
        def states(index: int) -> Tensor:
            noise.batch = reference.batches[index]
            return tail.states(index)

        return reference.compare(advance=advance, states=states)

    def together() -> Divergence:
        with simulate(model, spec, recipe, scales, weight_only):
            return reference.compare(advance=advance, states=tail.states)

    def cache() -> UnitSensitivity:
        noise = Noise(small)
        with simulate_modules(model, spec, {}, scales, recipe.kv_cache, watch=noise.watch):
            cost = compare(noise)
        return _result(CACHE, (), 0, recipe.kv_cache, cost, noise)

    def alone(unit: Unit) -> UnitSensitivity:
        tail.move_to(unit.layer)
        schemes = module_schemes(spec, recipe, unit.names)
        weights = unit_weights(model, spec, unit)
        pairs: dict[str, list[tuple[Tensor, Tensor]]] = {}
        noise = Noise(small)
        with simulate_modules(
            model, spec, schemes, scales, None, weight_only=weight_only, watch=noise.watch
        ):
            quantized = unit_weights(model, spec, unit)
            for each in unit.linears:
                both = (weights[each.name], quantized[each.name])
                pairs.setdefault(each.input, []).append(both)
            noise.multiply(pairs)
            cost = compare(noise)
        label = format_label(schemes.values())
        return _result(unit.name, unit.names, unit.weights, label, cost, noise)

    pair = (recipe.weights, recipe.activations)
    units: dict[str, Callable[[], UnitSensitivity]] = {
        EMBEDDINGS: lambda: _embeddings(model, checkpoint, pair, reference, tail, advance)
    }
    if recipe.kv_cache != "float16":
        units[CACHE] = cache  # before `tail` moves
    units |= {unit.name: partial(alone, unit) for unit in find_units(spec, recipe)}
    units[HEAD] = lambda: _head(checkpoint, pair, reference, advance)
    tokens = sum(batch.tokens for batch in reference.batches)
    advance(tokens * sum(map(steps.has, (_ALL, *units))))  # at once, which a rate leaves out
    everything = steps.once(_ALL, Divergence, together)
    found = {name: steps.once(name, UnitSensitivity, measure) for name, measure in units.items()}
    last = [found.pop(CACHE)] if CACHE in found else []
    return Sensitivity(everything, (*found.values(), *last))


def _embeddings(
    model: Any,
    checkpoint: Checkpoint,
    schemes: tuple[TensorScheme, TensorScheme],
    reference: Reference,
    tail: Tail,
    advance: Advance,
) -> UnitSensitivity:
    """Measures embeddings quantized by the weights' scheme; without a GEMM, no input is rounded."""
    table = model.get_input_embeddings().weight
    rounded = _rounded_matrix(checkpoint, EMBEDDINGS, table, schemes[0])

    def states(index: int) -> Tensor:
        ids = reference.batches[index].token_ids.to(table.device)
        return tail.states(index, embedding(ids, rounded))

    cost = reference.compare(advance=advance, states=states)
    noise = Noise({})
    noise.weigh(table, rounded)
    label = format_label([schemes])
    return _result(EMBEDDINGS, (EMBEDDINGS,), table.numel(), label, cost, noise)


def _head(
    checkpoint: Checkpoint,
    schemes: tuple[TensorScheme, TensorScheme],
    reference: Reference,
    advance: Advance,
) -> UnitSensitivity:
    """Measures the head alone, on the reference's last hidden states.

    A static scale comes from their largest magnitude, because nothing observes that input.
    """
    fmt = FORMATS[schemes[1].format]
    hidden = torch.cat(reference.hidden).float()
    amax = float(hidden.abs().max())
    static, shared = None, None
    if not schemes[1].dynamic:
        static = torch.tensor(scale_from_absmax(np.asarray(amax), fmt), device=hidden.device)
    elif schemes[1].two_level:
        shared = torch.tensor(global_scale(amax, fmt), device=hidden.device)
    name = EMBEDDINGS if checkpoint.spec.tied_embeddings else HEAD
    rounded = _rounded_matrix(checkpoint, name, reference.head, schemes[0])

    def round_rows(rows: Tensor) -> Tensor:
        return fake_quantize(rows, schemes[1], static, shared)

    def head(rows: Tensor) -> Tensor:
        return linear(round_rows(rows), rounded)

    cost = reference.compare(
        advance=advance, states=lambda index: reference.hidden[index], head=head
    )
    sizes = hidden.abs()[hidden != 0]
    small = float(sizes.kthvalue(math.ceil(SMALL * len(sizes))).values) if len(sizes) else 0.0
    noise = Noise({HEAD: small})
    noise.multiply({HEAD: [(reference.head, rounded)]})
    for rows in reference.hidden:
        for part in torch.split(rows.float(), reference.rows_at_once):
            noise.add(HEAD, part, round_rows(part))
    label = format_label([schemes])
    return _result(HEAD, (HEAD,), rounded.numel(), label, cost, noise)


@torch.no_grad()
def _rounded_matrix(
    checkpoint: Checkpoint, name: str, weight: Tensor, scheme: TensorScheme
) -> Tensor:
    """Rounds `weight`, the model's copy of the checkpoint's `name`, as `scheme` stores it."""
    found = scale_of_weight(name, checkpoint.read(f"{name}.weight"), scheme)
    scales = [
        None if scale is None else torch.from_numpy(np.asarray(scale)).to(weight.device)
        for scale in (found.scale, found.global_scale)
    ]
    return fake_quantize(weight, scheme, *scales)


def _result(
    name: str,
    linears: tuple[str, ...],
    weights: int,
    label: str,
    cost: Divergence,
    noise: Noise,
) -> UnitSensitivity:
    return UnitSensitivity(name, linears, weights, label, cost.kl, cost.kl_error, *noise.ratios())
