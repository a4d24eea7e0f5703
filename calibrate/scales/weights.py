"""Computes weight scales, by every method of every scheme; `real = stored * scale [* global]`.

| method   | scale of a tile                                                                     |
|----------|-------------------------------------------------------------------------------------|
| max      | maps its largest magnitude to the largest value of the format, as ModelOpt does.    |
|          | FP8 blocks: the least power of two at which nothing saturates                       |
| mse      | float32: the best of 32 multiples of that, 16 an octave. E8M0: the best power of    |
|          | two. E4M3 (NVFP4): the best of all 126 values. E2M1 elements: of the output's error |
| four_six | NVFP4: maps it to 6 or to 4, whichever errs less (arXiv 2512.02010)                 |

The best is that of least squared error, computed exactly. For E2M1, whose error is large, the
squared errors of column j are multiplied by the mean square of its input, E[x_j²], if calibration
observed it: the expected error of the output (see `calibrate.observe.channel_squares`). A tile of
zeros has scale 1. A weight is read in slabs of rows, so that no whole copy of it is ever in memory.

Scales of FP8 blocks are stored as float32, but are powers of two. vLLM's DeepGEMM rounds any other
scale up as it loads the weights and quantizes them again, which increases their error by 40 %.
Powers of two from the start increase it by 0.6 % (example model).

By every method, a weight that the checkpoint stores in FP8 blocks keeps its scales in a scheme of
FP8 blocks, and has no error. In other schemes it is decoded, and one is in memory at a time.
"""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from calibrate.scales.group_search import best_scales, tile_errors
from calibrate.scales.held_weight import HeldWeight
from octet.errors import NumericsError
from octet.model.checkpoint import Checkpoint
from octet.model.spec import Linear, ModelSpec
from octet.numerics import formats, microscaling, scaling
from octet.numerics.formats import E4M3, Float32Array, Format
from octet.numerics.scaling import Granularity
from octet.recipe import Recipe, TensorScheme
from octet.storage.tensors import Tensor

__all__ = ["Held", "MeanSquares", "WeightScale", "scale_of_weight", "weight_scales"]

# Multiples of the absmax scale that `mse` tries for float32 scales, 16 per octave: the grid's phase
# repeats every octave, and a weight's distribution has no tail worth clipping by more than half.
_MULTIPLES = tuple(2.0 ** (-step / 16) for step in range(-15, 17))

# Scale of the group that holds the largest magnitude of all. `max` uses 448, E4M3's largest value.
# The others leave headroom, so that this group too may map its largest magnitude to 4 instead of 6
# (arXiv 2512.02010: 256, because 256 * 6/4 = 384 is also a value of E4M3). The best global scale of
# all would gain 0.006 dB more on the example model (benchmarks/fp4_weights.py).
_LARGEST_SCALE = {"max": E4M3.max, "four_six": 256.0, "mse": 256.0}

_LEAST_IMPORTANCE = 1e-8  # of a column, relative to the mean
_SLAB = 1 << 19  # float32 elements of a weight at a time, per thread

R = TypeVar("R")
Held: TypeAlias = Callable[[str], torch.Tensor | None]  # a weight by name, if a GPU holds it
# float32 [K], the mean square of each channel of a linear's input, if it is known
MeanSquares: TypeAlias = Callable[[Linear], Float32Array | None]


@dataclass(frozen=True)
class WeightScale:
    """Scale of one linear's weight, in the shape of its granularity, and the SQNR.

    A scheme of two levels also has `global_scale` []; `scale` then holds E4M3 values.
    """

    scale: Float32Array
    format: str
    sqnr_db: float
    global_scale: Float32Array | None = None


def weight_scales(
    checkpoint: Checkpoint,
    recipe: Recipe,
    held: Held = lambda name: None,
    mean_squares: MeanSquares = lambda linear: None,
) -> Iterator[tuple[str, WeightScale]]:
    """Yields each quantized linear's name and scale.

    Linears that are fused when served (q/k/v, gate/up) share per-tensor and global scales. With
    method `max`, weights that `held` returns are not read from the files. Raises NumericsError,
    naming the weight, if one holds NaN or Inf.
    """
    with ThreadPoolExecutor(_cores(), "octet-weights") as pool:
        for scheme, linears in _fused(checkpoint.spec, recipe):
            weights: list[_Weight | HeldWeight] = []
            for linear in linears:
                name = f"{linear.name}.weight"
                blocks = checkpoint.blocks_of(name)
                if blocks is not None and scheme.blocks:
                    yield linear.name, WeightScale(blocks[1].float32(), scheme.format, math.inf)
                    continue
                values = held(name) if scheme.method == "max" else None
                if values is None:
                    known = mean_squares(linear) if scheme.weighs_inputs else None
                    weights.append(_Weight(name, checkpoint.read(name), scheme, pool, known))
                else:
                    weights.append(HeldWeight(name, values, scheme))
            if weights:
                for linear, found in zip(linears, _scales_of(weights, scheme), strict=True):
                    yield linear.name, found
            checkpoint.release()


def scale_of_weight(name: str, tensor: Tensor, scheme: TensorScheme) -> WeightScale:
    """Returns the scale of one weight [N, K] that is not shared."""
    with ThreadPoolExecutor(_cores(), "octet-weights") as pool:
        return _scales_of([_Weight(name, tensor, scheme, pool)], scheme)[0]


def _fused(spec: ModelSpec, recipe: Recipe) -> Iterable[tuple[TensorScheme, list[Linear]]]:
    """Groups the quantized linears that share a scale or a global scale."""
    groups: dict[tuple[str, TensorScheme], list[Linear]] = {}
    for linear in spec.linears():
        schemes = recipe.scheme_of(linear.name)
        if schemes is not None:
            weights, _ = schemes
            shared = weights.granularity == "tensor" or weights.two_level
            groups.setdefault((linear.input if shared else linear.name, weights), []).append(linear)
    return ((scheme, linears) for (_, scheme), linears in groups.items())


class _Weight:
    """One weight [N, K] under a scheme, read slab by slab."""

    def __init__(
        self,
        name: str,
        tensor: Tensor,
        scheme: TensorScheme,
        pool: ThreadPoolExecutor,
        mean_squares: Float32Array | None = None,
    ) -> None:
        self.name = name
        self.granularity = Granularity.of(scheme.granularity, scheme.group_size)
        self.e2m1 = scheme.format == "e2m1"
        self._tensor = tensor
        self._pool = pool
        self.columns = self.granularity.columns or tensor.shape[1]  # of a tile
        self.scale_shape = self.granularity.scale_shape(tensor.shape)
        self._importance = _importance(mean_squares, tensor.shape[1])

    @cached_property
    def tile_absmax(self) -> Float32Array:
        """The largest magnitude of each tile, in the shape of the scales."""
        return self._measured[0]

    @cached_property
    def power(self) -> float:
        """The sum of squares."""
        return self._measured[1]

    @cached_property
    def _measured(self) -> tuple[Float32Array, float]:
        granularity = self.granularity
        parts = self._map(lambda _, x: (scaling.absmax(x, granularity), _power(x)))
        tiles = [amax for amax, _ in parts]
        amax = np.concatenate(tiles) if granularity.rows else np.max(np.stack(tiles), axis=0)
        return amax, sum(power for _, power in parts)

    def errors(self, scales: Float32Array) -> NDArray[np.float64]:
        """Returns each tile's squared error for candidate scales [C, *scale_shape], same shape."""
        rows = self.granularity.rows
        candidates = scales.reshape(len(scales), -1, self.scale_shape[-1] if rows else 1)

        def of(part: slice, x: Float32Array) -> NDArray[np.float64]:
            tile_rows = rows or len(x)
            own = candidates
            if rows is not None:
                own = own[:, part.start // rows : -(-part.stop // rows)]
            errors = np.empty((len(candidates), len(x), candidates.shape[2]))
            tile_errors(x, own, tile_rows, self.columns, self.e2m1, errors)
            if tile_rows == 1:
                return errors
            return np.add.reduceat(errors, np.arange(0, len(x), tile_rows), axis=1)

        parts = self._map(of)
        whole = np.concatenate(parts, axis=1) if rows else np.sum(parts, axis=0)
        return np.asarray(whole).reshape(scales.shape)

    def sweep(
        self, candidates: Float32Array, *, powers: bool
    ) -> tuple[NDArray[np.int16], NDArray[np.float64]]:
        """Returns each group's best candidate index, -1 if all zero, and plain errors."""

        def of(part: slice, x: Float32Array) -> tuple[NDArray[np.int16], NDArray[np.float64]]:
            best = np.empty((len(x), self.scale_shape[1]), np.int16)
            errors = np.empty(len(x))
            best_scales(
                x, self._importance, self.columns, candidates, powers, self.e2m1, best, errors
            )
            return best, errors

        parts = self._map(of)
        best = np.concatenate([best for best, _ in parts])
        if (self._importance != 1).any():
            return best, self.errors(candidates[np.maximum(best, 0)][None])[0]
        return best, np.concatenate([errors for _, errors in parts])

    def _map(self, function: Callable[[slice, Float32Array], R]) -> list[R]:
        """Calls `function(rows, x[rows])` on every slab of whole tiles; results in order."""
        height, width = self._tensor.shape
        tile = self.granularity.rows or 1
        step = max(1, _SLAB // (max(1, width) * tile)) * tile
        parts = [slice(at, min(at + step, height)) for at in range(0, height, step)]

        def of(part: slice) -> R:
            codes = self._tensor.codes[part]
            return function(part, Tensor(self._tensor.dtype, codes).float32())

        try:
            return list(self._pool.map(of, parts))
        except NumericsError:  # repeat on the whole weight, for a message with its counts
            scaling.absmax(self._tensor.float32(), scaling.TENSOR, name=self.name)
            raise


def _scales_of(weights: Sequence[_Weight | HeldWeight], scheme: TensorScheme) -> list[WeightScale]:
    """Returns the scales of linears that share the scheme's per-tensor or global scale."""
    fmt = formats.format_named(scheme.format)
    shared = None
    if scheme.two_level:
        amax = max(float(weight.tile_absmax.max()) for weight in weights)
        shared = microscaling.global_scale(amax, fmt, largest=_LARGEST_SCALE[scheme.method])
    if scheme.method == "mse" and scheme.scale_format != "float32":
        found = [_searched(weight, scheme, shared) for weight in weights]
    else:
        found = _compared(weights, scheme, fmt, shared)
    return [
        WeightScale(scale, scheme.format, _sqnr_db(weight.power, error), shared)
        for weight, (scale, error) in zip(weights, found, strict=True)
    ]


def _searched(
    weight: _Weight | HeldWeight, scheme: TensorScheme, shared: Float32Array | None
) -> tuple[Float32Array, float]:
    """Finds the best representable scale of each group; returns scales and squared error."""
    assert isinstance(weight, _Weight)  # only `max` takes held ones
    if shared is None:
        values = np.ldexp(np.float32(1), np.arange(-127, 128)).astype(np.float32)
    else:
        values = formats.grid(E4M3)[1:]
    best, errors = weight.sweep(microscaling.combined(values, shared), powers=shared is None)
    scale = np.where(best < 0, np.float32(1), values[best])
    return scale, float(errors.sum())


def _compared(
    weights: Sequence[_Weight | HeldWeight],
    scheme: TensorScheme,
    fmt: Format,
    shared: Float32Array | None,
) -> list[tuple[Float32Array, float]]:
    """Finds the best of a few scales of each tile, and the squared error; ties go to the first."""
    amax = [weight.tile_absmax for weight in weights]
    if scheme.granularity == "tensor":
        amax = [np.max(np.stack(amax), axis=0)] * len(weights)
    candidates = [_candidates(tile, scheme, fmt, shared) for tile in amax]
    errors = [
        weight.errors(microscaling.combined(scales, shared))
        for weight, scales in zip(weights, candidates, strict=True)
    ]
    judged = errors
    if scheme.granularity == "tensor":
        judged = [np.sum(errors, axis=0)] * len(weights)
    results = []
    for scales, own, by in zip(candidates, errors, judged, strict=True):
        best = np.argmin(by, axis=0)[None]
        error = float(np.take_along_axis(own, best, axis=0).sum())
        results.append((np.take_along_axis(scales, best, axis=0)[0], error))
    return results


def _candidates(
    amax: Float32Array, scheme: TensorScheme, fmt: Format, shared: Float32Array | None
) -> Float32Array:
    """Returns the scales to try for tiles of largest magnitude `amax`, [C, *amax.shape]."""
    if shared is not None:
        targets = (6.0, 4.0) if scheme.method == "four_six" else (6.0,)
        scales = np.stack([_two_level(amax, shared, target) for target in targets])
    elif scheme.scale_format == "e8m0" or (scheme.blocks and scheme.method == "max"):
        scales = microscaling.power_of_two_scales(amax, fmt)[None]
    else:
        largest = np.asarray(scaling.scale_from_absmax(amax, fmt), np.float32)
        multiples = _MULTIPLES if scheme.method == "mse" else (1.0,)
        scales = np.stack([largest * np.float32(multiple) for multiple in multiples])
    if scheme.scale_format == "float32":
        scales = np.maximum(scales, np.finfo(np.float32).tiny)
    return np.where(amax == 0, np.float32(1), scales).astype(np.float32)


def _two_level(amax: Float32Array, shared: Float32Array, target: float) -> Float32Array:
    """Computes E4M3(amax / (target * global)), at least 2^-9 as in ModelOpt: no group is lost."""
    scale = amax / (np.float32(target) * shared)
    return formats.round_to(np.maximum(scale, np.float32(microscaling.LEAST_E4M3)), E4M3)


def _importance(mean_squares: Float32Array | None, columns: int) -> NDArray[np.float64]:
    """Returns what multiplies the squared errors of each column [K]; 1 if nothing is known.

    Columns whose input was always zero count a little, and the same.
    """
    if mean_squares is None or not np.isfinite(mean_squares).all() or not mean_squares.any():
        return np.ones(columns)
    known = mean_squares.astype(np.float64)
    return np.asarray(known + _LEAST_IMPORTANCE * known.mean())


def _cores() -> int:
    """Returns the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _power(x: Float32Array) -> float:
    return float(np.square(x, dtype=np.float64).sum())


def _sqnr_db(power: float, error: float) -> float:
    return float(10 * np.log10(power / error)) if error > 0 else float("inf")
