"""Finds the powers of two to fold into a layer's weights, so that its E5M2 cache needs no scale.

E5M2 has 32 octaves: nearly every model's keys and values fit without a scale, and are left alone.
Where `kv_scale` is not 1, K or V is multiplied by a power of two:

- Small ones, so that the largest magnitude is in (8, 16], which is usual in models.
- Large ones, so that it is in (3,584, 7,168]: lowered no further than E5M2 needs, with 3 octaves to
  spare for values that no sample reached.

`octet.model.folding` defines what is multiplied; the calibration's own checkpoint stays as it is.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from calibrate.observe.histogram import CodeDtype, Histogram, Histograms, magnitudes
from calibrate.scales.derive import kv_scale
from octet.artifacts.calibration import Observation
from octet.model.checkpoint import Checkpoint
from octet.model.folding import LARGEST_POWER, Folds, Kind, powers_of
from octet.model.spec import ModelSpec
from octet.numerics.bits import float32_to_bf16
from octet.numerics.formats import E5M2

__all__ = ["Folding", "find_folds", "shifted"]

Counts: TypeAlias = NDArray[np.int64]

_OBSERVED: Mapping[Kind, str] = {"k": "key", "v": "value"}
# Magnitudes that K or V may reach: raised, if they were small, and lowered, if they were large.
_RAISED, _LOWERED = 16.0, E5M2.max / 8
# The largest of the weights of q/k/v over the smallest, in magnitude. They share a scale in some
# recipes. v_proj of the example, made smaller by 2^8, loses 0.1 dB of SQNR in fp8-static, by 2^10
# 3.2 dB; in nvfp4 0.0 and 0.03 dB.
_SPREAD = 2.0**8


@dataclass(frozen=True)
class Folding:
    """The powers to fold, and why each other cache scale stays, by the observation's name."""

    folds: Folds
    refused: Mapping[str, str] = field(default_factory=dict)


def find_folds(
    checkpoint: Checkpoint,
    counts: Mapping[str, Counts],
    observations: Mapping[str, Observation],
    fitted: Collection[str] = (),
) -> Folding:
    """Finds the folds of every layer whose E5M2 cache needs a scale; reads only those layers.

    `fitted` are names of scales that an algorithm fitted weights to, and that must stay.
    """
    histograms, spec = Histograms(counts, observations), checkpoint.spec
    folds: Folds = {}
    refused: dict[str, str] = {}
    for index in range(spec.layers):
        layer = spec.layer(index)
        for kind, observed in _OBSERVED.items():
            name = f"{layer}.self_attn.{observed}"
            histogram = histograms.get(name)
            if histogram is None or kv_scale(histogram, "e5m2") == 1:
                continue
            own = {**folds.get(layer, {}), kind: _power(histogram)}
            why = _obstacle(spec) or _broken(checkpoint, layer, own, fitted)
            if why is None:
                folds[layer] = own
            else:
                refused[name] = why
    return Folding(folds, refused)


def shifted(
    folds: Folds,
    counts: Mapping[str, Counts],
    observations: Mapping[str, Observation],
) -> Mapping[str, Counts]:
    """Returns the `counts`, [32768] or [chunks, 32768], of the folded model; made on access."""
    powers = dict(_powers_of_observations(folds))
    return _Shifted(counts, observations, powers) if powers else counts


@dataclass(frozen=True)
class _Shifted(Mapping[str, Counts]):
    counts: Mapping[str, Counts]
    observations: Mapping[str, Observation]
    powers: Mapping[str, int]

    def __getitem__(self, name: str) -> Counts:
        found = self.counts[name]
        if name not in self.powers:
            return found
        return _times_power(found, self.observations[name].code_dtype, self.powers[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.counts)

    def __len__(self) -> int:
        return len(self.counts)


def _power(histogram: Histogram) -> int:
    target = _RAISED if histogram.absmax < _RAISED else _LOWERED
    power = int(np.floor(np.log2(target / histogram.absmax)))
    return max(-LARGEST_POWER, min(LARGEST_POWER, power))


def _obstacle(spec: ModelSpec) -> str | None:
    """Returns why nothing of this architecture can be folded."""
    if spec.generic:
        return f"Octet does not know what {spec.architecture} computes between its linears"
    if spec.fused_qkv:
        return "qkv_proj holds Q, K and V in one tensor, which has one power of two"
    if spec.qk_norm and spec.norm_offset:
        return "k_norm adds 1 to its weight"
    return None


def _broken(
    checkpoint: Checkpoint, layer: str, folds: dict[Kind, int], fitted: Collection[str]
) -> str | None:
    """Returns which tensor of the layer would not be the same number in its dtype or format."""
    powers = powers_of(checkpoint.spec, {layer: folds}, checkpoint.tensor_names)
    for name, power in powers.items():
        tensor = checkpoint.stored(name)
        if not tensor.holds_power(power):
            return f"{name} times 2^{power} is not exact in {tensor.dtype}"
        if f"{name}_scale" in fitted:
            return f"{name} was fitted to its scale"
    sizes = {}
    for name in (f"{layer}.self_attn.{letter}_proj.weight" for letter in "qkv"):
        size = float(np.abs(checkpoint.stored(name).float32()).max())
        if size > 0:
            sizes[name] = size
    after = {name: size * 2.0 ** powers.get(name, 0) for name, size in sizes.items()}
    if _spread(after) > max(_SPREAD, _spread(sizes)):
        least = min(after, key=lambda name: after[name])
        return (
            f"{least} would be 2^{np.log2(_spread(after)):.0f} smaller than the largest of q/k/v,"
            " with which it may share a scale"
        )
    return None


def _spread(sizes: Mapping[str, float]) -> float:
    return max(sizes.values()) / min(sizes.values()) if sizes else 1.0


def _powers_of_observations(folds: Folds) -> Iterator[tuple[str, int]]:
    """Yields the observed tensors that folding multiplies, and their powers of two."""
    for layer, kinds in folds.items():
        attention = f"{layer}.self_attn"
        if "k" in kinds:
            yield f"{attention}.key", kinds["k"]
            yield f"{attention}.query", -kinds["k"]
        if "v" in kinds:
            yield f"{attention}.value", kinds["v"]
            yield f"{attention}.o_proj.input", kinds["v"]


def _times_power(counts: Counts, code_dtype: CodeDtype, power: int) -> Counts:
    """Moves counts to the codes of 2^power times the magnitudes; Inf and NaN stay."""
    values = magnitudes(code_dtype)
    present = np.flatnonzero(counts.reshape(-1, len(values)).any(axis=0))
    present = present[np.isfinite(values[present])]
    scaled = values[present] * np.float32(2.0**power)
    if code_dtype == "bfloat16":
        codes = float32_to_bf16(scaled)
    else:
        with np.errstate(over="ignore"):
            codes = scaled.astype(np.float16).view(np.uint16)
    moved = counts.copy()
    moved[..., present] = 0
    for code, before in zip(codes, present, strict=True):  # several may round to one
        moved[..., code] += counts[..., before]
    return moved
