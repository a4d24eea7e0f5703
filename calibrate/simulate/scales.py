"""Shared by the parts of a simulation: scales, on a device and as a digest; the watch callback."""

import hashlib
from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["DeviceScales", "Scales", "Watch", "digest_of_scales"]

Scales: TypeAlias = Mapping[str, NDArray[np.float32]]  # keyed as in `octet.artifacts.calibration`

# watch(name, x, rounded, index): a tensor before and after rounding, named as in
# `octet.artifacts.calibration`. x is [B, T, ...] of a batch, or, for an expert, [n, K] of the
# tokens `index` among B * T.
Watch: TypeAlias = Callable[[str, Tensor, Tensor, Tensor | None], None]


def digest_of_scales(scales: Scales) -> str:
    """Returns the SHA-256 of names, shapes and values."""
    digest = hashlib.sha256()
    for name, scale in sorted(scales.items()):
        digest.update(f"{name} {scale.shape} ".encode() + np.ascontiguousarray(scale).tobytes())
    return digest.hexdigest()


class DeviceScales:
    """The scales of a calibration as tensors on `device`."""

    def __init__(self, scales: Scales, device: torch.device) -> None:
        self._scales, self.device = scales, device
        self._single: dict[str, Tensor] = {}  # scales of whole tensors, copied once

    def get(self, name: str) -> Tensor | None:
        stored = self._single.get(name, self._scales.get(name))
        if stored is None or isinstance(stored, Tensor):
            return stored
        found = torch.from_numpy(np.asarray(stored)).to(self.device)
        if found.numel() == 1:  # a copy waits until the GPU has done everything before
            self._single[name] = found
        return found

    def need(self, name: str) -> Tensor:
        """Returns a scale; raises KeyError, naming it, if it is missing."""
        found = self.get(name)
        if found is None:
            raise KeyError(name)
        return found
