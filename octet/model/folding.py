"""Moves a power of two out of the scales of the KV cache, into the weights that make K, Q and V.

Q.K and the attention's output stay the same, so a cache holds K and V in its range without a scale,
which not every engine applies (docs/compatibility.md):

| multiplied            | in                                                                |
|-----------------------|-------------------------------------------------------------------|
| K by 2^n, Q by 2^-n   | weight and bias of k_proj and q_proj; weight of k_norm and q_norm |
|                       | in a model that has them, where a factor of k_proj would vanish   |
| V by 2^m              | weight and bias of v_proj                                         |
| the output by 2^-m    | weight of o_proj, whose bias stays                                |

RoPE rotates, and commutes with any factor. Multiplying a float by a power of two changes only its
exponent, so every sum and product stays the same to the bit, as long as no exponent leaves the
range of the dtype (`Tensor.holds_power`).
"""

from collections.abc import Collection, Iterator
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from octet.model.spec import ModelSpec

__all__ = ["LARGEST_POWER", "Folds", "Kind", "describe_folds", "powers_of"]

LARGEST_POWER = 126  # 2^126 and 2^-126 are both normal float32 values
Kind: TypeAlias = Literal["k", "v"]
Power: TypeAlias = Annotated[int, Field(strict=True, ge=-LARGEST_POWER, le=LARGEST_POWER)]
# Module name of a decoder layer -> the power of two that K or V was multiplied by.
Folds: TypeAlias = dict[str, dict[Kind, Power]]


def powers_of(spec: ModelSpec, folds: Folds, tensors: Collection[str]) -> dict[str, int]:
    """Returns the power of two of each of `tensors` that `folds` multiplies, by name."""
    found = {}
    for layer, kinds in folds.items():
        for kind, power in kinds.items():
            modules = _modules(spec, kind)
            for module, own in zip(modules, (power, -power), strict=True):
                found[f"{layer}.self_attn.{module}.weight"] = own
                if module != "o_proj":
                    found[f"{layer}.self_attn.{module}.bias"] = own
    return {name: found[name] for name in tensors if name in found}


def describe_folds(spec: ModelSpec, folds: Folds) -> list[str]:
    """Returns lines such as "K of layer 3 times 2^-4, folded into k_norm and q_norm"."""
    together: dict[tuple[Kind, int], list[int]] = {}
    for index in range(spec.layers):
        for kind, power in folds.get(spec.layer(index), {}).items():
            together.setdefault((kind, power), []).append(index)
    return [
        f"{kind.upper()} of layer{'s' * (len(layers) > 1)} {', '.join(_ranges(layers))} times"
        f" 2^{power}, folded into {' and '.join(_modules(spec, kind))}"
        for (kind, power), layers in sorted(together.items())
    ]


def _modules(spec: ModelSpec, kind: Kind) -> tuple[str, str]:
    """Returns the module that is multiplied and the one that is divided, below `self_attn`."""
    if kind == "v":
        return "v_proj", "o_proj"
    return ("k_norm", "q_norm") if spec.qk_norm else ("k_proj", "q_proj")


def _ranges(numbers: list[int]) -> Iterator[str]:
    """Yields ascending `numbers` as "3", and as "5 to 9" where they are consecutive."""
    start = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1:
            first, last = numbers[start], numbers[at - 1]
            yield str(first) if first == last else f"{first} to {last}"
            start = at
