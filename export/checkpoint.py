"""calibration + checkpoint → a compressed-tensors checkpoint that vLLM loads.

Format `float-quantized`: `<linear>.weight` E4M3 [N, K], `<linear>.weight_scale` float32 ([1],
[N, 1] or [⌈N/128⌉, ⌈K/128⌉], a multiplier), `<linear>.input_scale` float32 [1] for static recipes.
All other tensors are copied bit for bit, shard by shard under the same names.

There is no `kv_cache_scheme`: with one, vLLM refuses `--kv-cache-dtype fp8_e5m2`; without, it
takes the cache's scales from `k_scale` and `v_scale` tensors, written only where they are not 1.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from export.source import Source, require_space
from octet.artifact import Manifest, check_destination, write_artifact
from octet.calibration import Calibration
from octet.errors import UnsupportedError
from octet.model import Linear
from octet.recipe import BLOCK, Recipe
from octet.tensors import Tensor, TensorFile, write_tensors

__all__ = ["export_checkpoint", "quantization_config"]

INDEX_FILE = "model.safetensors.index.json"


def export_checkpoint(
    calibration: Path, out: Path, *, model: Path | None = None, force: bool = False
) -> Manifest:
    """Writes the checkpoint directory `out`; `model` overrides where the original is.

    Memory is bounded by the largest shard. Raises UnsupportedError for a recipe that
    compressed-tensors cannot say, ArtifactError and CheckpointError for inputs that do not fit
    each other, ExportError without enough disk space; nothing is left then.
    """
    check_destination(out, force=force)
    source = Source.open(calibration, model)
    configuration = quantization_config(source)
    require_space(out, sum(shard.path.stat().st_size for shard in source.checkpoint.shards))
    details = {"format": "compressed-tensors", "kv_cache": source.recipe.kv_cache}
    with write_artifact(out, force=force) as writer:
        source.copy_side_files(writer.path, config=False)
        config = source.checkpoint.config | {"quantization_config": configuration}
        (writer.path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        _write_shards(source, writer.path)
        return writer.finish(source.manifest("checkpoint", details))


def quantization_config(source: Source) -> dict[str, Any]:
    """`quantization_config` of config.json; `ignore` lists the linears left as they were."""
    recipe = source.recipe
    _require_expressible(recipe)
    weights: dict[str, Any] = {"strategy": recipe.weights.granularity, "dynamic": False}
    if recipe.weights.granularity == "block":
        weights["block_structure"] = [BLOCK, BLOCK]
    activations: dict[str, Any] = {
        "strategy": recipe.activations.granularity,
        "dynamic": recipe.activations.dynamic,
    }
    if recipe.activations.granularity == "group":
        activations["group_size"] = recipe.activations.group_size
    e4m3 = {"num_bits": 8, "type": "float", "symmetric": True}
    kept = [linear.name for linear in source.spec.linears() if not source.quantizes(linear)]
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": [*kept, "lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": "float-quantized",
                "weights": e4m3 | weights,
                "input_activations": e4m3 | activations,
            }
        },
    }


def _require_expressible(recipe: Recipe) -> None:
    sizes = {recipe.weights.group_size, recipe.activations.group_size} - {None}
    pair = (recipe.weights.granularity, recipe.activations.granularity)
    known = {("channel", "token"), ("tensor", "tensor"), ("block", "group")}
    if pair not in known or sizes - {BLOCK}:
        raise UnsupportedError(
            f"recipe {recipe.name}: {pair[0]} weights with {pair[1]} activations"
            f"{f' and groups of {max(sizes)}' if sizes else ''} is no combination that vLLM serves;"
            " use the granularities of fp8, fp8-static or fp8-block"
        )


def _write_shards(source: Source, directory: Path) -> None:
    """One output shard for each input shard, and the index if there was one."""
    weight_map: dict[str, str] = {}
    linears = source.quantized_linears()
    total = 0
    for shard in source.checkpoint.shards:
        tensors = quantize_shard(source, shard, linears)
        write_tensors(directory / shard.path.name, tensors, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, shard.path.name)
        total += sum(tensor.codes.nbytes for tensor in tensors.values())
    if (source.checkpoint.path / INDEX_FILE).exists():
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def quantize_shard(
    source: Source, shard: TensorFile, linears: dict[str, Linear]
) -> dict[str, Tensor]:
    """The tensors of one output shard: quantized weights followed by their scales, all else as is.

    The cache's scales go with the shard that has their k_proj or v_proj.
    """
    tensors: dict[str, Tensor] = {}
    for name in shard.names:
        module, _, kind = name.rpartition(".")
        linear = linears.get(module) if kind == "weight" else None
        if linear is None:
            tensors[name] = shard.read(name)
            continue
        tensors[name] = Tensor("F8_E4M3", source.weight_codes(linear))
        tensors[f"{module}.weight_scale"] = _scale(source.weight_scale(linear))
        if not source.recipe.activations.dynamic:
            tensors[f"{module}.input_scale"] = _scale(source.input_scale(linear))
    tensors |= _cache_scales(source.calibration, shard)
    return tensors


def _cache_scales(calibration: Calibration, shard: TensorFile) -> dict[str, Tensor]:
    found = {}
    for name in shard.names:
        for kind in "kv":
            module = name.removesuffix(f".{kind}_proj.weight")
            scale = calibration.scales.get(f"{module}.{kind}_scale")
            if module != name and scale is not None and float(scale) != 1.0:
                found[f"{module}.{kind}_scale"] = _scale(scale)
    return found


def _scale(scale: np.ndarray[Any, np.dtype[np.float32]]) -> Tensor:
    """A scalar becomes [1], the shape that compressed-tensors gives its per-tensor parameters."""
    return Tensor("F32", scale.reshape(1) if scale.ndim == 0 else scale)
