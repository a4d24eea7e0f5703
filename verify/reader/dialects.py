"""Parses from config.json alone how a checkpoint stores its modules.

It knows four dialects that vLLM 0.24 to 0.32 reads. vLLM creates these tensors for a linear [N, K]:

| dialect                  | tensors                                                              |
|--------------------------|----------------------------------------------------------------------|
| compressed-tensors FP8   | weight e4m3, weight_scale [] [1] [N,1] [⌈N/b⌉,⌈K/b⌉], input_scale     |
| compressed-tensors NVFP4 | weight_packed, weight_scale e4m3 [N,K/16], weight_global_scale and   |
|                          | input_global_scale, which divide                                     |
| compressed-tensors MX    | weight or weight_packed, weight_scale u8 [N,K/32]                    |
| modelopt                 | weight, weight_scale; NVFP4: weight_scale_2, input_scale, multiplied |
| fp8                      | weight, weight_scale [] [1]; blocks: weight_scale_inv, multiplied    |
| mxfp4 (gpt-oss)          | blocks u8 [N,K/2], scales u8 [N,K/32] of each expert: experts.py     |
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from octet.errors import UnsupportedError
from verify.reader.scheme import Group, Inputs, Quantization, ScaleFormat, Stored

__all__ = ["quantization_of"]

_GROUPS_OF_128 = Inputs("e4m3", "group", True, "float32", 128)  # for weights in blocks


def quantization_of(config: Mapping[str, Any], where: str) -> Quantization | None:
    """Parses a config.json; None if it declares no quantization.

    Raises UnsupportedError, naming `where`, for a format that Octet's reader does not decode.
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
        if method == "mxfp4":
            return _mxfp4(raw)
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError, re.error) as error:
        raise UnsupportedError(f"{where}: quantization_config cannot be read: {error}") from None
    raise UnsupportedError(
        f"{where}: verify does not read quant_method '{method}'; it reads compressed-tensors,"
        " modelopt, fp8 and mxfp4"
    )


def _compressed_tensors(raw: Mapping[str, Any], where: str) -> Quantization:
    groups = []
    for name, group in raw["config_groups"].items():
        targets = _patterns(group["targets"])
        if all(target.endswith("Attention") for target in targets):
            continue  # vLLM skips it: kv_cache_scheme declares the same
        if group.get("weights") is None:
            continue
        form = str(group.get("format") or raw.get("format"))
        stored = _by_arguments(group["weights"], group.get("input_activations"), form, where, name)
        groups.append(Group(name, targets, stored))
    scheme = raw.get("kv_cache_scheme")
    return Quantization(
        "compressed-tensors",
        tuple(groups),
        _patterns(raw.get("ignore")),
        kv_scheme=scheme is not None,
        static_kv=not (isinstance(scheme, dict) and scheme.get("dynamic")),
        raw=raw,
    )


def _by_arguments(
    weights: Mapping[str, Any], inputs: Mapping[str, Any] | None, form: str, where: str, name: str
) -> Stored:
    bits, kind, strategy = weights.get("num_bits"), weights.get("type"), weights.get("strategy")
    size = weights.get("group_size")
    rounded = _inputs(inputs, where, name)
    static = "input_scale" if rounded is not None and not rounded.dynamic else None
    stored = _weights(weights, f"{form} {strategy}", static)
    if stored is None:
        raise UnsupportedError(
            f"{where}: {name} has {bits}-bit {kind} weights by {strategy}"
            f"{'' if size is None else f' of {size}'} ({form}), which verify does not decode; it"
            " decodes FP8 by tensor, channel and block, MXFP8, MXFP4 and NVFP4"
        )
    if stored.global_scale is not None and rounded is not None:
        stored = replace(stored, input_scale="input_global_scale")
    return replace(stored, inputs=rounded)


def _inputs(inputs: Mapping[str, Any] | None, where: str, name: str) -> Inputs | None:
    """Parses compressed-tensors' QuantizationArgs of activations.

    `dynamic` is "local" if the scales have two levels.
    """
    if inputs is None:
        return None
    strategy, size = str(inputs.get("strategy")), inputs.get("group_size")
    kind, bits = inputs.get("type"), inputs.get("num_bits")
    if kind != "float" or bits not in (4, 8):
        raise UnsupportedError(
            f"{where}: {name} has {bits}-bit {kind} inputs, which verify does not know; it knows"
            " FP8 and FP4"
        )
    two_level = strategy == "tensor_group"
    scales: ScaleFormat = "e4m3" if two_level else "e8m0" if size == 32 else "float32"
    return Inputs(
        "e4m3" if bits == 8 else "e2m1",
        "group" if two_level else strategy,
        bool(inputs.get("dynamic")),
        scales,
        None if size is None else int(size),
    )


def _weights(weights: Mapping[str, Any], label: str, static: str | None) -> Stored | None:
    """Parses compressed-tensors' QuantizationArgs of weights; None if they are not decoded."""
    bits, kind, strategy = weights.get("num_bits"), weights.get("type"), weights.get("strategy")
    size = weights.get("group_size")
    if (kind, bits) == ("float", 8):
        if strategy == "group" and size == 32:
            return _mx(label, "e4m3")
        if strategy == "tensor":
            return Stored(label, "e4m3", "tensor", input_scale=static)
        if strategy == "channel":
            return Stored(label, "e4m3", "channel", input_scale=static)
        if strategy == "block":
            tile = _tile(weights["block_structure"])
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
                divides=True,
            )
        if strategy == "group" and size == 32:
            return _mx(label, "e2m1")
    return None


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
    ignore = _patterns(inner.get("ignore") or inner.get("exclude_modules"))
    return Quantization("modelopt", groups, ignore, kv_scheme=_fp8_cache(inner), raw=raw)


def _fp8_cache(inner: Mapping[str, Any]) -> bool:
    """Decides as vLLM does whether an FP8 cache is declared.

    ModelOpt's own file gives the name of an algorithm, config.json a scheme.
    """
    scheme = inner.get("kv_cache_scheme")
    if isinstance(scheme, dict):
        return (scheme.get("type"), scheme.get("num_bits")) == ("float", 8)
    return str(inner.get("kv_cache_quant_algo") or scheme or "").upper() == "FP8"


def _modelopt_stored(algorithm: str, where: str) -> Stored:
    label = f"modelopt {algorithm}"
    if algorithm == "FP8":
        inputs = Inputs("e4m3", "tensor", dynamic=False)
        return Stored(label, "e4m3", "tensor", input_scale="input_scale", inputs=inputs)
    if algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
        return Stored(label, "e4m3", "channel", inputs=Inputs("e4m3", "token", dynamic=True))
    if algorithm in ("FP8_PB_WO", "FP8_BLOCK_SCALES"):
        return Stored(label, "e4m3", "block", (128, 128), inputs=_GROUPS_OF_128)
    if algorithm == "MXFP8":
        return replace(_mx(label, "e4m3"), inputs=Inputs("e4m3", "group", True, "e8m0", 32))
    if algorithm == "MXFP4":
        inputs = Inputs("e2m1", "group", True, "e8m0", 32)
        return replace(_mx(label, "e2m1", "weight"), inputs=inputs)
    if algorithm in ("NVFP4", "W4A16_NVFP4"):
        rounded = algorithm == "NVFP4"
        return Stored(
            label,
            "e2m1",
            "group",
            (1, 16),
            scale_dtypes=("F8_E4M3",),
            global_scale="weight_scale_2",
            input_scale="input_scale" if rounded else None,
            inputs=Inputs("e2m1", "group", True, "e4m3", 16) if rounded else None,
        )
    raise UnsupportedError(
        f"{where}: verify does not decode quant_algo '{algorithm}'; it decodes FP8,"
        " FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, NVFP4, W4A16_NVFP4, MXFP8, MXFP4 and"
        " MIXED_PRECISION"
    )


def _fp8(raw: Mapping[str, Any]) -> Quantization:
    """Parses `quant_method: fp8`; vLLM computes dynamic activation scales for each token."""
    static = raw.get("activation_scheme") == "static"
    inputs = Inputs("e4m3", "tensor" if static else "token", not static)
    name = "input_scale" if static else None
    block = raw.get("weight_block_size")
    if block is None:
        stored = Stored("fp8 tensor", "e4m3", "tensor", input_scale=name, inputs=inputs)
    else:
        tile = _tile(block)
        inputs = inputs if static else _GROUPS_OF_128
        stored = Stored("fp8 block", "e4m3", "block", tile, scale="weight_scale_inv", inputs=inputs)
    ignore = _patterns(raw.get("ignored_layers") or raw.get("modules_to_not_convert"))
    return Quantization("fp8", (Group("fp8", ("Linear",), stored),), ignore, raw=raw)


def _mxfp4(raw: Mapping[str, Any]) -> Quantization:
    """Parses gpt-oss's `quant_method: mxfp4`: experts alone, whose activations are not rounded."""
    unknown = sorted(raw.keys() - {"quant_method", "modules_to_not_convert"})
    if unknown:
        raise ValueError(f"{unknown[0]} is no field of quant_method mxfp4")
    stored = replace(_mx("mxfp4 weight-only", "e2m1", "blocks"), scale="scales")
    ignore = _patterns(raw.get("modules_to_not_convert"))
    return Quantization("mxfp4", (Group("mxfp4", ("*.mlp.experts.*",), stored),), ignore, raw=raw)


def _patterns(names: Any) -> tuple[str, ...]:
    """Returns a list of names and patterns; ValueError or re.error for one that cannot be."""
    patterns = tuple(names or ())
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ValueError(f"{pattern!r} is no name of a module")
        if pattern.startswith("re:"):
            re.compile(pattern[3:])
    return patterns


def _tile(block: Any) -> tuple[int, int]:
    rows, columns = (int(size) for size in block)
    if rows < 1 or columns < 1:
        raise ValueError(f"blocks of {rows} x {columns}")
    return rows, columns
