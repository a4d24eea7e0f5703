"""Recognises from config.json a checkpoint whose weights are E4M3 in blocks of 128 by 128."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "POWER_SCALES",
    "QUANTIZATION",
    "BlockFormat",
    "block_format",
    "has_blocks",
    "has_power_scales",
]

QUANTIZATION = ("quantization_config", "compression_config")  # keys of config.json
# DeepSeek-V3.1's entry in the quantization: all scales of blocks are powers of two.
POWER_SCALES = {"scale_fmt": "ue8m0"}

_SIZE = [128, 128]
# Patterns of modules: without groups, and with few wildcards, none takes long to match.
_PATTERN = re.compile(r"(?!(.*\*){5})[\w.^$*\\|-]{1,200}")


@dataclass(frozen=True)
class BlockFormat:
    """Names the scales, and the modules that config.json says are not quantized."""

    scale: str  # of a linear: the last part of its name
    ignored: frozenset[str]
    patterns: tuple[re.Pattern[str], ...] = ()

    def ignores(self, module: str) -> bool:
        """Returns whether config.json names the module, or parts of its name in sequence."""
        parts = module.split(".")
        for start in range(len(parts)):
            for stop in range(start + 1, len(parts) + 1):
                if ".".join(parts[start:stop]) in self.ignored:
                    return True
        return any(pattern.match(module) for pattern in self.patterns)


def block_format(config: Mapping[str, Any]) -> BlockFormat | None:
    """Returns how config.json stores block weights; None for any other quantization, or none."""
    section = _section(config)
    if section.get("quant_method") == "fp8":
        fits = section.get("weight_block_size") == _SIZE and section.get("fmt", "e4m3") == "e4m3"
        dynamic = section.get("activation_scheme", "dynamic") == "dynamic"
        names = [section.get(key) or [] for key in ("modules_to_not_convert", "ignored_layers")]
        return _format("weight_scale_inv", names) if fits and dynamic else None
    if section.get("quant_method") == "compressed-tensors":
        groups = section.get("config_groups")
        fits = isinstance(groups, dict) and bool(groups) and all(map(_is_block, groups.values()))
        others = section.get("kv_cache_scheme") or section.get("sparsity_config")
        if fits and not others:
            return _format("weight_scale", [section.get("ignore") or []])
    return None


def has_power_scales(config: Mapping[str, Any]) -> bool:
    """Returns whether config.json says that all scales of blocks are powers of two."""
    return bool(_section(config).get("scale_fmt") == POWER_SCALES["scale_fmt"])


def has_blocks(config: Mapping[str, Any]) -> bool:
    """Returns whether config.json says that weights are in FP8 blocks, of any size and any tool.

    Unlike `block_format`, it does not ask whether Octet can read them.
    """
    section = _section(config)
    if section.get("weight_block_size") or section.get("quant_algo") == "FP8_PB_WO":
        return True
    groups = section.get("config_groups")
    found = groups.values() if isinstance(groups, dict) else ()
    return any(_weights(group).get("strategy") == "block" for group in found)


def _section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    section = config.get("quantization_config", config.get("compression_config"))
    return section if isinstance(section, dict) else {}


def _weights(group: object) -> Mapping[str, Any]:
    """Returns how a group of compressed-tensors stores weights; {} if it does not say."""
    weights = group.get("weights") if isinstance(group, dict) else None
    return weights if isinstance(weights, dict) else {}


def _is_block(group: object) -> bool:
    weights = _weights(group)
    return (
        isinstance(group, dict)
        and group.get("targets") == ["Linear"]
        and (weights.get("num_bits"), weights.get("type")) == (8, "float")
        and weights.get("strategy") == "block"
        and weights.get("block_structure") == _SIZE
        and not weights.get("dynamic")
    )


def _format(scale: str, lists: Sequence[object]) -> BlockFormat | None:
    if not all(isinstance(x, list) and all(isinstance(y, str) for y in x) for x in lists):
        return None
    names = {name for found in lists if isinstance(found, list) for name in found}
    written = {name for name in names if name.startswith("re:")}
    texts = [name.removeprefix("re:") for name in sorted(written)]
    if not all(_PATTERN.fullmatch(text) for text in texts):
        return None
    try:
        patterns = tuple(map(re.compile, texts))
    except re.error:
        return None
    return BlockFormat(scale, frozenset(names - written), patterns)
