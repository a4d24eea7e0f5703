"""How a checkpoint's configuration says that its modules are stored: read from config.json alone.

The three dialects that vLLM 0.24 to 0.32 reads, with the tensors it creates for a linear [N, K]:

| dialect                  | tensors                                                              |
|--------------------------|----------------------------------------------------------------------|
| compressed-tensors FP8   | weight e4m3, weight_scale [] [1] [N,1] [⌈N/b⌉,⌈K/b⌉], input_scale     |
| compressed-tensors NVFP4 | weight_packed, weight_scale e4m3 [N,K/16], weight_global_scale and   |
|                          | input_global_scale, which divide                                     |
| compressed-tensors MX    | weight or weight_packed, weight_scale u8 [N,K/32]                    |
| modelopt                 | weight, weight_scale; NVFP4: weight_scale_2, input_scale, multiplied |
| fp8                      | weight, weight_scale [] [1]; blocks: weight_scale_inv, multiplied    |
"""

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from octet.errors import UnsupportedError

__all__ = ["Group", "Quantization", "Stored", "quantization_of"]

Dialect = Literal["compressed-tensors", "modelopt", "fp8"]


@dataclass(frozen=True)
class Stored:
    """The tensors of a quantized linear, beside its bias."""

    label: str  # for people
    elements: Literal["e4m3", "e2m1"]
    granularity: Literal["tensor", "channel", "block", "group"]
    tile: tuple[int, int] | None = None  # rows and columns that share a scale: block and group
    scale_dtypes: tuple[str, ...] = ("F32", "BF16", "F16")
    weight: str = "weight"
    scale: str = "weight_scale"
    global_scale: str | None = None
    input_scale: str | None = None  # a static one, or NVFP4's global one
    divides: bool = False  # whether the global scales are stored as divisors

    @property
    def packed(self) -> bool:
        return self.elements == "e2m1"

    @property
    def tensors(self) -> tuple[str, ...]:
        """Every name that an engine waits for."""
        optional = (self.global_scale, self.input_scale)
        return (self.weight, self.scale, *(name for name in optional if name is not None))

    def weight_shape(self, n: int, k: int) -> tuple[int, int]:
        return (n, k // 2) if self.packed else (n, k)

    def scale_shapes(self, n: int, k: int) -> tuple[tuple[int, ...], ...]:
        """The shapes in which scales of a weight [N, K] may be stored."""
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
    """Modules that are stored alike: those that one of `targets` matches."""

    name: str
    targets: tuple[str, ...]
    stored: Stored


@dataclass(frozen=True)
class Quantization:
    """A `quantization_config`, understood."""

    dialect: Dialect
    groups: tuple[Group, ...]
    ignore: tuple[str, ...] = ()
    kv_scheme: bool = False  # whether it declares an FP8 (E4M3) cache
    static_kv: bool = True
    raw: Mapping[str, Any] = field(default_factory=dict)

    def ignores(self, module: str) -> bool:
        return any(self.matches(pattern, module) for pattern in self.ignore)

    def group_of(self, module: str) -> Group | None:
        """The group that an engine takes for a linear: by its name, else by its class."""
        if self.ignores(module):
            return None
        for group in self.groups:
            if any(target != "Linear" and self.matches(target, module) for target in group.targets):
                return group
        return next((group for group in self.groups if "Linear" in group.targets), None)

    def matches(self, pattern: str, module: str) -> bool:
        """As the engines do: `re:` and the exact name; ModelOpt's are wildcards and prefixes."""
        if self.dialect == "compressed-tensors":
            if pattern.startswith("re:"):
                return re.match(pattern[3:], module) is not None
            return pattern == module
        if pattern == module or fnmatch.fnmatchcase(module, pattern):
            return True
        # vLLM: any module whose name holds the entry; here whole parts of the name alone.
        return f".{pattern}." in f".{module}."


def quantization_of(config: Mapping[str, Any], where: str) -> Quantization | None:
    """From a config.json; None for one that declares no quantization.

    UnsupportedError, naming `where`, for what Octet's reader does not decode.
    """
    raw = config.get("quantization_config")
    if raw is None:
        return None
    if not isinstance(raw, dict):
        raise UnsupportedError(f"{where}: quantization_config is not an object")
    method = str(raw.get("quant_method", "")).lower()
    try:
        if method == "compressed-tensors":
            return _compressed_tensors(raw, where)
        if method.startswith("modelopt"):
            return _modelopt(raw, where)
        if method == "fp8":
            return _fp8(raw)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UnsupportedError(f"{where}: quantization_config cannot be read: {error}") from None
    raise UnsupportedError(
        f"{where}: quant_method '{method}' is none that verify reads; it reads compressed-tensors,"
        " modelopt and fp8"
    )


def _compressed_tensors(raw: Mapping[str, Any], where: str) -> Quantization:
    groups = []
    for name, group in raw["config_groups"].items():
        targets = tuple(str(target) for target in group["targets"])
        if all(target.endswith("Attention") for target in targets):
            continue  # vLLM skips it: the cache's scheme says the same
        if group.get("weights") is None:
            continue
        form = str(group.get("format") or raw.get("format"))
        stored = _by_arguments(group["weights"], group.get("input_activations"), form, where, name)
        groups.append(Group(name, targets, stored))
    scheme = raw.get("kv_cache_scheme")
    return Quantization(
        "compressed-tensors",
        tuple(groups),
        tuple(raw.get("ignore") or ()),
        kv_scheme=scheme is not None,
        static_kv=not (isinstance(scheme, dict) and scheme.get("dynamic")),
        raw=raw,
    )


def _by_arguments(
    weights: Mapping[str, Any], inputs: Mapping[str, Any] | None, form: str, where: str, name: str
) -> Stored:
    bits, kind, strategy = weights.get("num_bits"), weights.get("type"), weights.get("strategy")
    size = weights.get("group_size")
    static = "input_scale" if inputs and inputs.get("dynamic") in (False, None) else None
    label = f"{form} {strategy}"
    if (kind, bits) == ("float", 8):
        if strategy == "group" and size == 32:
            return _mx(label, "e4m3")
        if strategy == "tensor":
            return Stored(label, "e4m3", "tensor", input_scale=static)
        if strategy == "channel":
            return Stored(label, "e4m3", "channel", input_scale=static)
        if strategy == "block":
            rows, columns = weights["block_structure"]
            tile = (int(rows), int(columns))
            return Stored(label, "e4m3", "block", tile, input_scale=static)
    if (kind, bits) == ("float", 4):
        if strategy == "tensor_group" and size == 16:
            return Stored(
                label,
                "e2m1",
                "group",
                (1, 16),
                scale_dtypes=("F8_E4M3",),
                weight="weight_packed",
                global_scale="weight_global_scale",
                input_scale="input_global_scale" if inputs else None,
                divides=True,
            )
        if strategy == "group" and size == 32:
            return _mx(label, "e2m1")
    raise UnsupportedError(
        f"{where}: {name} has {bits}-bit {kind} weights by {strategy}"
        f"{'' if size is None else f' of {size}'} ({form}), which verify does not decode; it"
        " decodes FP8 by tensor, channel and block, MXFP8, MXFP4 and NVFP4"
    )


def _mx(label: str, elements: Literal["e4m3", "e2m1"], weight: str | None = None) -> Stored:
    return Stored(
        label,
        elements,
        "group",
        (1, 32),
        scale_dtypes=("U8", "F8_E8M0"),
        weight=weight or ("weight" if elements == "e4m3" else "weight_packed"),
    )


def _modelopt(raw: Mapping[str, Any], where: str) -> Quantization:
    inner = raw.get("quantization") if isinstance(raw.get("quantization"), dict) else raw
    assert isinstance(inner, Mapping)
    algorithm = str(inner.get("quant_algo") or "").upper()
    layers = inner.get("quantized_layers") or {}
    if algorithm == "MIXED_PRECISION":
        groups = tuple(
            Group(module, (module,), _modelopt_stored(str(facts["quant_algo"]).upper(), where))
            for module, facts in layers.items()
        )
    else:
        groups = (Group(algorithm, ("Linear",), _modelopt_stored(algorithm, where)),)
    cache = inner.get("kv_cache_quant_algo") or inner.get("kv_cache_scheme")
    ignore = inner.get("ignore") or inner.get("exclude_modules") or ()
    return Quantization("modelopt", groups, tuple(ignore), kv_scheme=bool(cache), raw=raw)


def _modelopt_stored(algorithm: str, where: str) -> Stored:
    label = f"modelopt {algorithm}"
    if algorithm == "FP8":
        return Stored(label, "e4m3", "tensor", input_scale="input_scale")
    if algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
        return Stored(label, "e4m3", "channel")
    if algorithm in ("FP8_PB_WO", "FP8_BLOCK_SCALES"):
        return Stored(label, "e4m3", "block", (128, 128))
    if algorithm == "MXFP8":
        return _mx(label, "e4m3")
    if algorithm in ("NVFP4", "W4A16_NVFP4"):
        return Stored(
            label,
            "e2m1",
            "group",
            (1, 16),
            scale_dtypes=("F8_E4M3",),
            global_scale="weight_scale_2",
            input_scale="input_scale" if algorithm == "NVFP4" else None,
        )
    raise UnsupportedError(
        f"{where}: quant_algo '{algorithm}' is none that verify decodes; it decodes FP8,"
        " FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, NVFP4, W4A16_NVFP4, MXFP8 and MIXED_PRECISION"
    )


def _fp8(raw: Mapping[str, Any]) -> Quantization:
    static = "input_scale" if raw.get("activation_scheme") == "static" else None
    block = raw.get("weight_block_size")
    if block is None:
        stored = Stored("fp8 tensor", "e4m3", "tensor", input_scale=static)
    else:
        tile = (int(block[0]), int(block[1]))
        stored = Stored("fp8 block", "e4m3", "block", tile, scale="weight_scale_inv")
    ignore = tuple(raw.get("ignored_layers") or raw.get("modules_to_not_convert") or ())
    return Quantization("fp8", (Group("fp8", ("Linear",), stored),), ignore, raw=raw)
