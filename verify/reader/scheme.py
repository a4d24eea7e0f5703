"""Storage schemes of a checkpoint's modules, the same for all dialects of configuration."""

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Dialect", "Group", "Inputs", "Quantization", "ScaleFormat", "Stored"]

Dialect = Literal["compressed-tensors", "modelopt", "fp8", "mxfp4"]
ScaleFormat = Literal["float32", "e8m0", "e4m3"]


@dataclass(frozen=True)
class Inputs:
    """An engine's rounding of a linear's activations, in the terms of `octet.recipe`.

    `dynamic` scales are computed at run time; if there are two levels, the global one is static.
    """

    elements: Literal["e4m3", "e2m1"]
    granularity: str  # tensor, token or group
    dynamic: bool
    scale_format: ScaleFormat = "float32"
    group_size: int | None = None

    def __str__(self) -> str:
        size = f" of {self.group_size}" if self.group_size else ""
        made = "at run time" if self.dynamic else "static"
        return f"{self.elements} by {self.granularity}{size}, {self.scale_format} scales {made}"


@dataclass(frozen=True)
class Stored:
    """The tensors of a quantized linear, beside its bias."""

    label: str  # for messages
    elements: Literal["e4m3", "e2m1"]
    granularity: Literal["tensor", "channel", "block", "group"]
    tile: tuple[int, int] | None = None  # rows and columns that share a scale: block and group
    scale_dtypes: tuple[str, ...] = ("F32", "BF16", "F16")
    weight: str = "weight"
    scale: str = "weight_scale"
    global_scale: str | None = None
    input_scale: str | None = None  # a static one, or NVFP4's global one
    divides: bool = False  # whether the global scales are stored as divisors
    inputs: Inputs | None = None  # None: activations are not rounded (weight-only)

    @property
    def scale_format(self) -> ScaleFormat:
        """Format of the weight's scales."""
        if self.global_scale is not None:
            return "e4m3"
        return "e8m0" if "U8" in self.scale_dtypes else "float32"

    @property
    def packed(self) -> bool:
        return self.elements == "e2m1"

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of all tensors that an engine requires."""
        optional = (self.global_scale, self.input_scale)
        return (self.weight, self.scale, *(name for name in optional if name is not None))

    def weight_shape(self, n: int, k: int) -> tuple[int, int]:
        return (n, k // 2) if self.packed else (n, k)

    def scale_shapes(self, n: int, k: int) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes in which the scales of a weight [N, K] may be stored."""
        if self.granularity == "tensor":
            return ((), (1,))
        if self.granularity == "channel":
            return ((n, 1), (n,))
        assert self.tile is not None
        rows, columns = -(-n // self.tile[0]), -(-k // self.tile[1])
        if self.granularity == "block":
            return ((rows, columns), (rows, 1, columns, 1))
        return ((rows, columns),)


@dataclass(frozen=True)
class Group:
    """Modules that are stored in the same way: those that one of `targets` matches."""

    name: str
    targets: tuple[str, ...]
    stored: Stored


@dataclass(frozen=True)
class Quantization:
    """A parsed `quantization_config`."""

    dialect: Dialect
    groups: tuple[Group, ...]
    ignore: tuple[str, ...] = ()
    kv_scheme: bool = False  # whether it declares an FP8 (E4M3) cache
    static_kv: bool = True
    raw: Mapping[str, Any] = field(default_factory=dict)

    def ignores(self, module: str) -> bool:
        return any(self.matches(pattern, module) for pattern in self.ignore)

    def group_of(self, module: str) -> Group | None:
        """Returns the group that an engine uses for a linear: by its name, else by its class."""
        if self.ignores(module):
            return None
        for group in self.groups:
            if any(target != "Linear" and self.matches(target, module) for target in group.targets):
                return group
        return next((group for group in self.groups if "Linear" in group.targets), None)

    def matches(self, pattern: str, module: str) -> bool:
        """Matches a module's name as the engines do.

        compressed-tensors has `re:` patterns and exact names, ModelOpt wildcards and prefixes.
        """
        if self.dialect == "compressed-tensors":
            if pattern.startswith("re:"):
                return re.match(pattern[3:], module) is not None
            return pattern == module
        if pattern == module or fnmatch.fnmatchcase(module, pattern):
            return True
        # vLLM matches any name that contains the entry; here only whole parts of the name match.
        return f".{pattern}." in f".{module}."
