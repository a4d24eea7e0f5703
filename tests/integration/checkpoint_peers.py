"""Checkpoints that others write; their interpreters run this, one command a process.

    python -m tests.integration.checkpoint_peers compressed-tensors MODEL OUT SCHEME ...
    python -m tests.integration.checkpoint_peers modelopt MODEL OUT CONFIG ...
    python -m tests.integration.checkpoint_peers llm-compressor MODEL OUT SCHEME ...

SCHEME is one of compressed-tensors' presets, CONFIG the name of one of ModelOpt's; each is written
to OUT/<its name>. The first writes `decompressed.npz` beside, what compressed-tensors itself reads.
llm-compressor's SCHEME may end in "+kv": with an FP8 cache, whose scales it calibrates.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def compressed_tensors(model: Path, preset: str, out: Path) -> None:
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

    scheme = preset_name_to_scheme(preset, ["Linear"])
    form = infer_module_format(torch.nn.Linear, scheme)
    compressor = BaseCompressor.get_value_from_registry(form.value)
    original = load_file(model / "model.safetensors")
    tensors: dict[str, torch.Tensor] = {}
    real: dict[str, np.ndarray] = {}
    for name, value in original.items():
        module = name.removesuffix(".weight")
        if not module.endswith("_proj"):
            tensors[name] = value
            continue
        state = _parameters(original, module, scheme)
        compressed = compressor.compress(state, scheme)
        tensors |= {f"{module}.{key}": tensor.contiguous() for key, tensor in compressed.items()}
        real[module] = compressor.decompress(compressed, scheme)["weight"].float().numpy()
    config = json.loads((model / "config.json").read_text())
    described = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=form.value,
        ignore=["lm_head"],
        quantization_status="compressed",
    )
    config["quantization_config"] = described.to_dict()
    out.mkdir(parents=True)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, default=str))
    np.savez(out / "decompressed.npz", **real)


def _parameters(original: dict[str, torch.Tensor], module: str, scheme: Any) -> dict[str, Any]:
    """What an observer would have given the module, from the largest magnitudes."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = scheme.weights
    weight = original[f"{module}.weight"].float()
    state: dict[str, Any] = {"weight": weight}
    shared = None
    if args.strategy == "tensor_group":
        parent, _, projection = module.rpartition(".")
        group = next((one for one in FUSED if projection in one), (projection,))
        tops = [original[f"{parent}.{one}.weight"].float().abs().max() for one in group]
        top = torch.stack(tops).max().reshape(1)
        shared = generate_gparam(-top, top)
        state["weight_global_scale"] = shared
        if scheme.input_activations is not None:
            state["input_global_scale"] = generate_gparam(torch.tensor([-8.0]), torch.tensor([8.0]))
    largest = _largest(weight, args)
    state["weight_scale"], _ = calculate_qparams(-largest, largest, args, global_scale=shared)
    inputs = scheme.input_activations
    if inputs is not None and inputs.dynamic is False:
        state["input_scale"] = torch.tensor([8.0 / 448])
    return state


def _largest(weight: torch.Tensor, args: Any) -> torch.Tensor:
    n, k = weight.shape
    strategy = str(getattr(args.strategy, "value", args.strategy))
    if strategy == "tensor":
        return weight.abs().max().reshape(1)
    if strategy == "channel":
        return weight.abs().amax(dim=1, keepdim=True)
    if strategy == "block":
        rows, columns = args.block_structure
        return weight.abs().reshape(n // rows, rows, k // columns, columns).amax(dim=(1, 3))
    return weight.abs().reshape(n, k // args.group_size, args.group_size).amax(dim=2)


def modelopt(model: Path, config: str, out: Path) -> None:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    tokens = torch.randint(1, 4000, (2, 32), generator=torch.Generator().manual_seed(0))
    mtq.quantize(network, getattr(mtq, config), forward_loop=lambda net: net(tokens))
    export_hf_checkpoint(network, export_dir=out)
    for file in model.glob("tokenizer*"):
        shutil.copy(file, out)


def llm_compressor(model: Path, name: str, out: Path) -> None:
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM

    scheme, _, cache = name.partition("+")
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    tokens = torch.randint(1, 4000, (16, 32), generator=torch.Generator().manual_seed(0)).tolist()
    kv_cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    oneshot(
        model=network,
        dataset=Dataset.from_list(
            [{"input_ids": row, "attention_mask": [1] * len(row)} for row in tokens]
        ),
        recipe=QuantizationModifier(
            targets="Linear",
            scheme=scheme,
            ignore=["lm_head", "re:.*mlp.gate$"],
            kv_cache_scheme=kv_cache | {"symmetric": True} if cache else None,
        ),
        max_seq_length=32,
        num_calibration_samples=len(tokens),
    )
    network.save_pretrained(out, save_compressed=True)
    for file in model.glob("tokenizer*"):
        shutil.copy(file, out)


if __name__ == "__main__":
    command, model, out, *names = sys.argv[1:]
    run = {
        "compressed-tensors": compressed_tensors,
        "modelopt": modelopt,
        "llm-compressor": llm_compressor,
    }[command]
    for name in names:
        run(Path(model), name, Path(out) / name)
