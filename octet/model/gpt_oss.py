"""Presents the experts of a gpt-oss checkpoint as one linear each, and decodes those in MXFP4.

| tensor of the file, below `<layer>.mlp.experts` | presented as, for expert e                    |
|-------------------------------------------------|-----------------------------------------------|
| gate_up_proj [E, H, 2I], down_proj [E, I, H]    | <e>.<projection>.weight [N, K], transposed    |
| <projection>_bias [E, N]                        | <e>.<projection>.bias [N]                     |
| <projection>_blocks U8 [E, N, K/32, 16]         | <e>.<projection>.weight U8 [N, K/2]           |
| <projection>_scales U8 [E, N, K/32]             | <e>.<projection>.weight_scale U8 [N, K/32]    |

A byte of `_blocks` holds two E2M1 codes, the one of the even column in its low bits; `_scales` are
E8M0. Source: `convert_moe_packed_tensors` in transformers' integrations/mxfp4.py.
"""

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from octet.errors import CheckpointError, UnsupportedError
from octet.model.spec import ModelSpec
from octet.numerics import scaling
from octet.numerics.bits import float32_to_bf16, unpack_e2m1
from octet.numerics.formats import E2M1, E8M0, decode
from octet.storage.stacked import Part, StackedFile
from octet.storage.tensors import Tensor, TensorFile

__all__ = ["GPT_OSS", "Mxfp4Weights", "find_mxfp4", "is_mxfp4", "refuse_gpt_oss", "split_experts"]

GPT_OSS = "GptOssForCausalLM"
_GROUP = 32
_LARGEST = 252  # of E8M0: 6 * 2^(252 - 127) is finite in float32
_FLOATS = ("F32", "F16", "BF16")
_STACKED = re.compile(
    r"(?P<module>.+\.mlp\.experts)\.(?P<projection>gate_up_proj|down_proj)"
    r"(?P<kind>|_bias|_blocks|_scales)"
)
_KEYS = {"quant_method", "modules_to_not_convert"}


def is_mxfp4(config: Mapping[str, Any]) -> bool:
    """Returns whether config.json says that a gpt-oss's experts are in MXFP4."""
    section = config.get("quantization_config")
    return (
        config.get("architectures") == [GPT_OSS]
        and isinstance(section, dict)
        and section.get("quant_method") == "mxfp4"
    )


def refuse_gpt_oss(spec: ModelSpec, where: object) -> None:
    """Raises UnsupportedError for a gpt-oss model, in a command that needs a recipe."""
    if spec.architecture == GPT_OSS:
        raise UnsupportedError(
            f"{where}: Octet does not quantize {GPT_OSS}: vLLM serves its MXFP4 checkpoint as it"
            " is, and `octet golden` makes a proof pack of that"
        )


def split_experts(
    shards: Iterable[TensorFile], config: Mapping[str, Any], spec: ModelSpec, where: str
) -> tuple[TensorFile, ...]:
    """Returns `shards` with each expert's matrices as tensors of their own.

    Raises CheckpointError or UnsupportedError, naming the tensor of the file, for one that gpt-oss
    does not have, of another dtype or shape, or missing.
    """
    packed = is_mxfp4(config)
    if packed:
        _check_section(config["quantization_config"], spec, where)
    split, found = [], set[str]()
    for shard in shards:
        parts: dict[str, Part] = {}
        for name in shard.names:
            if ".experts." in name:
                parts |= _parts_of(name, shard, spec, packed, where)
                found.add(name)
        split.append(StackedFile(shard, parts) if parts else shard)
    kinds = ("_blocks", "_scales", "_bias") if packed else ("", "_bias")
    for layer in map(spec.layer, spec.sparse_layers):
        for projection in spec.expert_projections:
            for kind in kinds:
                name = f"{spec.experts_of(layer)}.{projection}{kind}"
                if name not in found:
                    raise CheckpointError(f"{where}: tensor {name} is missing")
    return tuple(split)


def _check_section(section: Mapping[str, Any], spec: ModelSpec, where: str) -> None:
    """Raises UnsupportedError for a quantization_config that is not as OpenAI publishes it."""
    unknown = sorted(section.keys() - _KEYS)
    if unknown:
        raise UnsupportedError(
            f"{where}: config.json: quantization_config has {unknown[0]}"
            f" {section[unknown[0]]!r}, which Octet does not read with quant_method mxfp4"
        )
    kept = section.get("modules_to_not_convert") or []
    if not isinstance(kept, list) or not all(isinstance(name, str) for name in kept):
        raise UnsupportedError(f"{where}: config.json: modules_to_not_convert is no list of names")
    for name in kept:
        for layer in map(spec.layer, spec.sparse_layers):
            if fnmatch.fnmatchcase(spec.experts_of(layer), name):
                raise UnsupportedError(
                    f"{where}: config.json: modules_to_not_convert names {name}, and Octet reads"
                    " the experts of either all layers in MXFP4 or of none"
                )


def _parts_of(
    name: str, shard: TensorFile, spec: ModelSpec, packed: bool, where: str
) -> dict[str, Part]:
    """Returns the experts that a stacked tensor holds, by the names they are presented under."""
    match = _STACKED.fullmatch(name)
    kinds = ("_blocks", "_scales", "_bias") if packed else ("", "_bias")
    if match is None or match["kind"] not in kinds:
        says = "has the experts in MXFP4" if packed else "declares no MXFP4"
        raise CheckpointError(
            f"{where}: tensor {name} is unknown in a {GPT_OSS} whose config.json {says};"
            " download both again"
        )
    up = match["projection"] == "gate_up_proj"
    inner, hidden = spec.moe_intermediate_size, spec.hidden_size
    n, k = (2 * inner, hidden) if up else (hidden, inner)
    if packed and k % _GROUP:
        raise UnsupportedError(f"{where}: {name} has rows of {k}, no multiple of {_GROUP}")
    leaf, stored, shape, dtypes = {
        "": ("weight", (k, n), (n, k), _FLOATS),
        "_bias": ("bias", (n,), (n,), _FLOATS),
        "_blocks": ("weight", (n, k // _GROUP, _GROUP // 2), (n, k // 2), ("U8",)),
        "_scales": ("weight_scale", (n, k // _GROUP), (n, k // _GROUP), ("U8",)),
    }[match["kind"]]
    if shard.shape(name) != (spec.experts, *stored):
        raise CheckpointError(
            f"{where}: {name} has shape {list(shard.shape(name))}, config.json says"
            f" {[spec.experts, *stored]}"
        )
    if shard.dtype(name) not in dtypes:
        raise UnsupportedError(
            f"{where}: {name} is stored as {shard.dtype(name)}; Octet reads {' and '.join(dtypes)}"
        )
    return {
        f"{match['module']}.{expert}.{match['projection']}.{leaf}": Part(
            name, expert, shape, transposed=not match["kind"]
        )
        for expert in range(spec.experts)
    }


@dataclass(frozen=True)
class Mxfp4Weights:
    """The scale tensor of each weight that is stored in MXFP4; decoded to BF16, which is exact."""

    scales: Mapping[str, str]  # `<linear>.weight` -> the name of its scale
    where: str
    dtype: str = "BF16"

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape [N, K] of a decoded weight, of the bytes' [N, K/2]."""
        return (*stored[:-1], 2 * stored[-1])

    def decode(self, name: str, read: Callable[[str], Tensor]) -> Tensor:
        """Decodes a weight; CheckpointError, naming it, if a scale is NaN or too large."""
        packed, scale = read(name), read(self.scales[name])
        if (scale.codes > _LARGEST).any():
            at = np.argwhere(scale.codes > _LARGEST)[0].tolist()
            raise CheckpointError(
                f"{self.where}: {self.scales[name]}: the E8M0 scale at {at} is NaN, or makes the"
                " weight infinite; download the checkpoint again"
            )
        codes, factor = unpack_e2m1(packed.codes), decode(scale.codes, E8M0)
        real = scaling.dequantize(codes, factor, E2M1, scaling.group(_GROUP))
        return Tensor(self.dtype, float32_to_bf16(real))


def find_mxfp4(names: Iterable[str], where: str) -> Mxfp4Weights:
    """Finds the weights in MXFP4 among the tensors that `split_experts` presents."""
    scales = {x.removesuffix("_scale"): x for x in names if x.endswith(".weight_scale")}
    return Mxfp4Weights(scales, where)
