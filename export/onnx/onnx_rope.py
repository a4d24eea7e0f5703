"""Rotary position embedding: the tables that the graph's RotaryEmbedding looks up.

cos and sin of position · f, with f = theta^(-2i/D) for pair i of D = rotary_dim, changed as
ModelSpec.rope_scaling says. All in float32, operation by operation as transformers' rope utilities
compute it: the model was trained with these numbers.
"""

import numpy as np
import numpy.typing as npt

from octet.model.spec import ModelSpec, RopeScaling

__all__ = ["rope_tables"]

Float32Array = npt.NDArray[np.float32]


def rope_tables(spec: ModelSpec) -> tuple[Float32Array, Float32Array]:
    """cos and sin, float32 [max_positions, rotary_dim/2]."""
    dim = spec.rotary_dim
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    frequencies = np.float32(1) / np.power(np.float32(spec.rope_theta), exponents)
    if spec.rope_scaling is not None:
        frequencies = _scaled(frequencies, spec.rope_scaling)
    angles = np.arange(spec.max_positions, dtype=np.float32)[:, None] * frequencies
    return np.cos(angles), np.sin(angles)


def _scaled(frequencies: Float32Array, scaling: RopeScaling) -> Float32Array:
    slowed = frequencies / np.float32(scaling.factor)
    if scaling.type == "linear":
        return slowed
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    positions = scaling.original_max_positions
    assert low is not None and high is not None and positions is not None  # llama3 has all
    lengths = np.float32(2 * np.pi) / frequencies  # of a wave, in positions
    kept = (np.float32(positions) / lengths - np.float32(low)) / np.float32(high - low)
    blended = (np.float32(1) - kept) * frequencies / np.float32(scaling.factor) + kept * frequencies
    middle = np.where(lengths > np.float32(positions / low), slowed, blended)
    return np.where(lengths < np.float32(positions / high), frequencies, middle)
