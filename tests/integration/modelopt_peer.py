"""Quantizes a checkpoint with ModelOpt; its interpreter runs this, one command a process.

    python -m tests.integration.modelopt_peer max MODEL TOKENS DTYPE OUT
    python -m tests.integration.modelopt_peer apply MODEL TOKENS RECIPE OUT ALGORITHM ...
    python -m tests.integration.modelopt_peer gptq-update

TOKENS is int64 [B, T] in a .npy file. `max` writes the largest magnitudes that ModelOpt's max
calibration finds, `apply` what our `apply_algorithm` returns for each algorithm.
"""

import json
import sys
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from calibrate.algorithms.modelopt import Algorithm, apply_algorithm
from calibrate.algorithms.modelopt_backend import Rounding, _round, update_blockwise
from calibrate.decoder.arithmetic import stock_linears
from calibrate.decoder.loading import ComputeDtype, load_model
from calibrate.samples.batches import Batch
from calibrate.scales.weights import scale_of_weight
from octet.model.checkpoint import Checkpoint
from octet.recipe import PRESETS, Recipe
from octet.storage.tensors import Tensor, write_tensors

E4M3 = {"num_bits": (4, 3)}


def find_largest(path: Path, tokens: Path, dtype: ComputeDtype, out: Path) -> None:
    """`<linear> tensor` [], `<linear> channel` [N] and `<linear> input` [], in float32."""
    import modelopt.torch.quantization as mtq

    checkpoint = Checkpoint.open(path)
    token_ids = torch.from_numpy(np.load(tokens))
    found = {}
    for name, axis in (("tensor", None), ("channel", 0)):
        network = stock_linears(load_model(checkpoint, dtype))
        config: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
        for linear in checkpoint.spec.linears():
            weight = {"quantizer_name": f"{linear.name}.weight_quantizer", "cfg": E4M3}
            config.append(weight | {"cfg": E4M3 | {"axis": axis}})
            config.append({"quantizer_name": f"{linear.name}.input_quantizer", "cfg": E4M3})
        mtq.quantize(
            network,
            {"quant_cfg": config, "algorithm": "max"},
            forward_loop=lambda network: network(token_ids, use_cache=False),
        )
        for linear in checkpoint.spec.linears():
            module = network.get_submodule(linear.name)
            amax = module.weight_quantizer.amax.float()
            found[f"{linear.name} {name}"] = amax.reshape([-1] if axis == 0 else []).numpy()
            found[f"{linear.name} input"] = module.input_quantizer.amax.float().reshape([]).numpy()
    np.savez(out, **found)


def apply(model: Path, tokens: Path, recipe: str, out: Path, algorithm: str) -> None:
    """weights.safetensors, scales.safetensors and details.json."""
    token_ids = torch.from_numpy(np.load(tokens))
    count, length = token_ids.shape
    batch = Batch(token_ids, (length,) * count, tuple(f"line {row}" for row in range(count)))
    assert algorithm in get_args(Algorithm)
    changed = apply_algorithm(
        Checkpoint.open(model),
        algorithm,  # type: ignore[arg-type]  # it was just checked
        Recipe.load(recipe),
        [batch],
        dtype="float32",
    )
    out.mkdir()
    write_tensors(out / "weights.safetensors", changed.tensors)
    scales = {name: Tensor.of(np.asarray(scale)) for name, scale in changed.scales.items()}
    write_tensors(out / "scales.safetensors", scales)
    (out / "details.json").write_text(json.dumps(changed.details))


def compare_gptq_updates() -> None:
    """Whether our update gives ModelOpt's bits, by recipe."""
    from modelopt.torch.quantization.utils.calib_utils import (
        compute_hessian_inverse,
        gptq_blockwise_update,
    )

    torch.manual_seed(0)
    inputs = torch.randn(512, 192) @ torch.randn(192, 192)
    hessian = 2 / len(inputs) * inputs.T @ inputs
    equal = {}
    for name, recipe in PRESETS.items():
        weight = torch.randn(160, 192) * 0.05
        found = scale_of_weight(name, Tensor.of(weight.numpy()), recipe.weights)
        rounding = Rounding(
            recipe.weights,
            scale=torch.from_numpy(np.asarray(found.scale)),
            global_scale=(
                None if found.global_scale is None else torch.from_numpy(found.global_scale)
            ),
        )
        inverse = compute_hessian_inverse(hessian, weight, 0.01)
        theirs, ours = weight.clone(), weight.clone()

        class Quantizer:
            octet_rounding = rounding

        gptq_blockwise_update(theirs, inverse, 128, lambda x, q=Quantizer: _round(x, q))
        update_blockwise(ours, inverse, 128, rounding)
        equal[name] = torch.equal(ours, theirs) and not torch.equal(ours, weight)
    print(json.dumps(equal))


def main(command: str, *arguments: str) -> None:
    if command == "max":
        model, tokens, dtype, out = arguments
        find_largest(Path(model), Path(tokens), dtype, Path(out))
    elif command == "apply":
        model, tokens, recipe, folder, *algorithms = arguments
        for algorithm in algorithms:
            apply(Path(model), Path(tokens), recipe, Path(folder) / algorithm, algorithm)
    else:
        assert command == "gptq-update", command
        compare_gptq_updates()


if __name__ == "__main__":
    main(*sys.argv[1:])
