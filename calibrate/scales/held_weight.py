"""Measures a weight that a GPU holds: the magnitudes of its tiles, and the errors of their scales.

Largest magnitudes, and so the scales of method `max`, are those of `calibrate.scales.weights` to
the bit; errors differ by the order of sums, in float64.
"""

from collections.abc import Iterator
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

from calibrate.decoder.rounding import round_to
from octet.numerics import formats, scaling
from octet.numerics.formats import Float32Array
from octet.numerics.scaling import Granularity
from octet.recipe import TensorScheme

__all__ = ["HeldWeight"]

_SLAB = 1 << 24  # elements at a time


class HeldWeight:
    """Measures the weight `name`, `values` [N, K], for a scheme that tries one scale a tile."""

    def __init__(self, name: str, values: torch.Tensor, scheme: TensorScheme) -> None:
        self._name, self._values = name, values
        self._format = formats.format_named(scheme.format)
        granularity = Granularity.of(scheme.granularity, scheme.group_size)
        self._rows, self._columns = granularity.rows, granularity.columns or values.shape[1]
        self._scale_shape = granularity.scale_shape(tuple(values.shape))

    @property
    def tile_absmax(self) -> Float32Array:
        """The largest magnitude of each tile, in the shape of the scales."""
        return self._measured[0]

    @property
    def power(self) -> float:
        """The sum of squares."""
        return self._measured[1]

    @cached_property
    def _measured(self) -> tuple[Float32Array, float]:
        tiles, power = [], self._values.new_zeros((), dtype=torch.float64)
        for _, x in self._slabs():
            tiles.append(x.abs().amax((1, 3)))
            power += x.double().square_().sum()
        amax = torch.cat(tiles).cpu().numpy()
        if not np.isfinite(amax).all():  # raises, with the counts in its message
            scaling.absmax(self._values.float().cpu().numpy(), scaling.TENSOR, name=self._name)
        amax = amax if self._rows else amax.max(axis=0)
        return amax.reshape(self._scale_shape), float(power)

    def errors(self, scales: Float32Array) -> NDArray[np.float64]:
        """Returns each tile's squared error for candidate scales [1, *scale_shape], same shape."""
        given = torch.from_numpy(scales.reshape(-1, 1, scales.shape[-1] if self._rows else 1, 1))
        given = given.to(self._values.device)
        parts = []
        for part, x in self._slabs():
            scale = given[part] if self._rows else given
            noise = round_to(x / scale, self._format).mul_(scale).double().sub_(x)
            parts.append(noise.square_().sum((1, 3)))
        errors = torch.cat(parts).cpu().numpy()
        errors = errors if self._rows else errors.sum(axis=0)
        return np.asarray(errors.reshape(scales.shape))

    def _slabs(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yields slabs as float32 [rows of tiles, rows, columns of tiles, columns], with zeros.

        The slice counts rows of tiles.
        """
        height, width = self._values.shape
        tile = self._rows or 1
        step = max(1, _SLAB // (width * tile)) * tile
        for start in range(0, height, step):
            x = self._values[start : start + step].float()
            rows = self._rows or len(x)
            x = pad(x, (0, -width % self._columns, 0, -len(x) % rows))
            tiles = x.reshape(len(x) // rows, rows, -1, self._columns)
            yield slice(start // tile, start // tile + len(tiles)), tiles
