"""Signal-to-noise ratios of the tensors that a simulation rounds, collected while it runs."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from calibrate.decoder.arithmetic import linear
from calibrate.samples.batches import Batch, real_tokens

__all__ = ["Noise"]

Pair = tuple[Tensor, Tensor]  # a weight [N, K] as it was, and quantized


class Noise:
    """Sums the energies of tensors and of their rounding errors; `watch` is for `simulate_modules`.

    `small` maps each observation to the largest magnitude that counts as small. Set `batch` before
    each batch runs, so that padding is left out.
    """

    def __init__(self, small: Mapping[str, float]) -> None:
        self.batch: Batch | None = None
        self._small = small
        self._readers: Mapping[str, Sequence[Pair]] = {}
        self._input, self._smaller, self._output = _Energy(), _Energy(), _Energy()
        self._weight = _Energy()

    def weigh(self, before: Tensor, after: Tensor) -> None:
        """Adds the error of a weight."""
        self._weight.add(before, after)

    def multiply(self, readers: Mapping[str, Sequence[Pair]]) -> None:
        """Adds the errors of `readers`, and from now on those of the outputs of their GEMMs.

        `readers` maps an observation to the weights that read it, as they were and quantized.
        """
        self._readers = readers
        for pair in (pair for pairs in readers.values() for pair in pairs):
            self.weigh(*pair)

    def watch(self, name: str, x: Tensor, rounded: Tensor, index: Tensor | None) -> None:
        """See `calibrate.simulate.model.Watch`."""
        if self.batch is not None:
            keep = real_tokens(self.batch).to(x.device)
            keep = keep if index is None else keep.flatten()[index]
            self.add(name, x[keep], rounded[keep])

    def add(self, name: str, x: Tensor, rounded: Tensor) -> None:
        """Adds the error of rows of activations, and of the outputs computed from them."""
        self._input.add(x, rounded)
        few = x.abs() <= self._small[name]
        self._smaller.add(x * few, rounded * few)
        for before, after in self._readers.get(name, ()):
            self._output.add(linear(x, before), linear(rounded, after))

    def ratios(self) -> tuple[float | None, float | None, float | None, float | None]:
        """Returns the SQNR in dB of activations, of their small values, of weights and of outputs.

        A ratio is None if there is no error, no signal, or no measurement.
        """
        return self._input.db(), self._smaller.db(), self._weight.db(), self._output.db()


class _Energy:
    """Sums Σ x² and Σ (x - y)² on the tensors' device, so that the host does not wait for it."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []  # [2] float64

    def add(self, x: Tensor, y: Tensor) -> None:
        x, y = x.float(), y.float()
        both = torch.stack((x.square().sum(), (x - y).square_().sum())).double()
        self._sums = [self._sums[0] + both] if self._sums else [both]

    def db(self) -> float | None:
        """Returns the signal-to-noise ratio in dB; None without signal or error."""
        if not self._sums:
            return None
        signal, noise = self._sums[0].tolist()
        return 10 * math.log10(signal / noise) if signal > 0 and noise > 0 else None
