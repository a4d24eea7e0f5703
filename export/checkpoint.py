"""calibration + checkpoint → a compressed-tensors checkpoint that vLLM loads.

FP8 weights and their scales take the place of the projections' weights; every other tensor is
copied bit for bit, shard by shard, one tensor in memory at a time. There is no `kv_cache_scheme`:
with one, vLLM refuses an E5M2 cache; without, it takes `--kv-cache-dtype fp8_e5m2`.

| recipe     | weight_scale                | input_scale |
|------------|-----------------------------|-------------|
| fp8        | f32 [N, 1]                  | none        |
| fp8-static | f32 [1]                     | f32 [1]     |
| fp8-block  | f32 [⌈N/128⌉, ⌈K/128⌉]      | none        |

Scales multiply: real = stored * scale. Tensor names and the configuration are those of
compressed-tensors' `float-quantized` format.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from export.source import Source, require_space
from octet.artifact import Manifest, check_destination, write_artifact
from octet.chat import DEFAULT_TEMPLATE, TEMPLATE_FILE, template_of
from octet.errors import UnsupportedError
from octet.model import Linear
from octet.recipe import TensorScheme
from octet.tensors import PendingTensor, Tensor, TensorFile, write_tensors

__all__ = ["export_checkpoint", "write_checkpoint"]

INDEX_FILE = "model.safetensors.index.json"
Tensors = dict[str, Tensor | PendingTensor]


def export_checkpoint(
    calibration: Path, out: Path, *, model: Path | None = None, force: bool = False
) -> Manifest:
    """Writes the checkpoint directory `out`; `model` overrides where the original is.

    Raises UnsupportedError for a recipe that vLLM would refuse, naming the layer, and ArtifactError
    or ExportError before the first byte for all else that stands in the way.
    """
    check_destination(out, force=force, inputs=[calibration])
    source = Source.open(calibration, model)
    check_supported(source)
    require_space(out, sum(shard.path.stat().st_size for shard in source.checkpoint.shards))
    with write_artifact(out, force=force) as writer:
        details = write_checkpoint(source, writer.path)
        return writer.finish(source.manifest("checkpoint", details))


def write_checkpoint(source: Source, directory: Path) -> dict[str, Any]:
    """Fills `directory` with what an engine loads; returns the facts for a manifest."""
    source.copy_side_files(directory, config=False)
    config = source.checkpoint.config | {"quantization_config": quantization_config(source)}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weight_map: dict[str, str] = {}
    for shard in source.checkpoint.shards:
        tensors = _quantized_shard(source, shard)
        write_tensors(directory / shard.path.name, tensors, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, shard.path.name)
    if (source.checkpoint.path / INDEX_FILE).exists():
        _write_index(directory, weight_map)
    details: dict[str, Any] = {"format": "compressed-tensors float-quantized"}
    if source.recipe.kv_cache == "e5m2":
        details["serve_with"] = "--kv-cache-dtype fp8_e5m2"
    if template_of(source.checkpoint.path) is None:
        # vLLM answers no chat without a template, and takes none from a request.
        (directory / TEMPLATE_FILE).write_text(DEFAULT_TEMPLATE)
        details["chat_template"] = "plain default: the model brings none"
    return details


def check_supported(source: Source) -> None:
    """Raises UnsupportedError for what vLLM would refuse or get wrong."""
    recipe = source.recipe
    if recipe.kv_cache == "e4m3":
        raise UnsupportedError(
            f"recipe {recipe.name}: no export writes an e4m3 cache; derive another calibration with"
            " `octet rescale --recipe ... --kv-cache e5m2`"
        )
    quantized = source.quantized_linears()
    pair = (recipe.weights.granularity, recipe.activations.granularity)
    if pair not in (("channel", "token"), ("tensor", "tensor"), ("block", "group")):
        raise UnsupportedError(
            f"recipe {recipe.name}: {pair[0]} weights with {pair[1]} activations is no combination"
            " that vLLM serves in FP8; use those of fp8, fp8-static or fp8-block"
        )
    fused: dict[str, list[Linear]] = {}
    for linear in source.spec.linears():
        fused.setdefault(linear.input, []).append(linear)
    for group in fused.values():
        inside = [linear for linear in group if linear.name in quantized]
        if inside and len(inside) < len(group):
            outside = next(linear for linear in group if linear.name not in quantized)
            raise UnsupportedError(
                f"recipe {recipe.name} excludes {outside.name} but not {inside[0].name}: vLLM"
                " fuses them; exclude both or neither"
            )
    size = recipe.weights.group_size or 1
    for linear in quantized.values():
        if linear.out_features % size or linear.in_features % size:
            raise UnsupportedError(
                f"recipe {recipe.name}: {linear.name} is {linear.out_features}x"
                f"{linear.in_features}, and vLLM needs multiples of {size}; use recipe fp8"
            )


def quantization_config(source: Source) -> dict[str, Any]:
    """config.json's `quantization_config`, as compressed-tensors defines it."""
    recipe = source.recipe
    excluded = [item.name for item in source.spec.linears() if not source.quantizes(item)]
    group = {
        "targets": ["Linear"],
        "format": "float-quantized",
        "weights": _scheme(recipe.weights),
        "input_activations": _scheme(recipe.activations),
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head", *excluded],
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
    }


def _scheme(scheme: TensorScheme) -> dict[str, Any]:
    described: dict[str, Any] = {
        "num_bits": 8,
        "type": "float",
        "strategy": scheme.granularity,
        "symmetric": True,
        "dynamic": scheme.dynamic,
    }
    if scheme.granularity == "block":
        described["block_structure"] = [scheme.group_size, scheme.group_size]
    elif scheme.granularity == "group":
        described["group_size"] = scheme.group_size
    return described


def _quantized_shard(source: Source, shard: TensorFile) -> Tensors:
    """The tensors of `shard` as they will be written, in their order; nothing is computed yet."""
    quantized = {f"{name}.weight": item for name, item in source.quantized_linears().items()}
    tensors: Tensors = {}
    for name in shard.names:
        if name in quantized:
            tensors |= _quantized_linear(source, quantized[name])
        else:
            tensors[name] = source.checkpoint.read(name)
        tensors |= _cache_scales(source, name)
    return tensors


def _quantized_linear(source: Source, linear: Linear) -> Tensors:
    shape = (linear.out_features, linear.in_features)
    tensors: Tensors = {
        f"{linear.name}.weight": PendingTensor(
            "F8_E4M3", shape, lambda: source.weight_codes(linear)
        ),
        f"{linear.name}.weight_scale": _at_least_1d(source.weight_scale(linear)),
    }
    if not source.recipe.activations.dynamic:
        tensors[f"{linear.name}.input_scale"] = _at_least_1d(source.input_scale(linear))
    return tensors


def _cache_scales(source: Source, name: str) -> Tensors:
    """`k_scale` after a k_proj's weight and `v_scale` after a v_proj's, where they are not 1."""
    attention, _, projection = name.removesuffix(".weight").rpartition(".")
    if projection not in ("k_proj", "v_proj"):
        return {}
    scale_name = f"{attention}.{projection[0]}_scale"
    scale = source.calibration.scales.get(scale_name)
    return {} if scale is None or scale == 1 else {scale_name: _at_least_1d(scale)}


def _at_least_1d(scale: Any) -> Tensor:
    return Tensor.of(np.atleast_1d(np.asarray(scale, np.float32)))


def _write_index(directory: Path, weight_map: dict[str, str]) -> None:
    files = {directory / name for name in weight_map.values()}
    index = {
        "metadata": {"total_size": sum(path.stat().st_size for path in files)},
        "weight_map": dict(sorted(weight_map.items())),
    }
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
