"""Servers of quantized checkpoints, computed by transformers, and their judgement by a proof pack.

The checkpoints are changed as a loader with a fault would read them.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from octet.artifacts.manifest import MANIFEST_FILE
from octet.proof.declared import declared_paths
from octet.proof.judge import judge
from octet.proof.reference import Proofs
from octet.proof.responses import Response
from octet.proof.verdict import Verdict
from octet.storage.tensors import Tensor, TensorFile, write_tensors
from verify.reader.checkpoint import Written
from verify.reader.scheme import Inputs

__all__ = [
    "WEIGHTS",
    "Change",
    "Tensors",
    "answered",
    "changed",
    "drop_cache_scales",
    "drop_scales",
    "exchange_cache_scales",
    "judged",
    "load_one_slot",
    "scaled",
    "served",
    "share_global_scales",
    "swap_nibbles",
]

WEIGHTS = "model.safetensors"
Tensors = dict[str, Tensor]
Change = Callable[[Tensors], None]


def changed(source: Path, out: Path, change: Change) -> Path:
    """A copy of a checkpoint without a manifest, as another tool leaves it."""
    shutil.copytree(source, out)
    (out / MANIFEST_FILE).unlink(missing_ok=True)
    file = TensorFile.open(source / WEIGHTS)
    tensors = {
        name: Tensor(file.read(name).dtype, np.array(file.read(name).codes)) for name in file.names
    }
    change(tensors)
    write_tensors(out / WEIGHTS, tensors, {"format": "pt"})
    return out


def scaled(tensors: Tensors, name: str, factor: float) -> None:
    found = tensors[name]
    tensors[name] = Tensor(found.dtype, np.asarray(found.codes * np.float32(factor), np.float32))


def rounded(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """E4M3 of `x` divided by a scale, multiplied again."""
    codes = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (codes.float() * scale).to(x.dtype)


def rounds(inputs: Inputs, stored: torch.Tensor | None) -> Callable[..., Any]:
    """A hook that rounds what a linear multiplies: with its stored scale, or one for each token."""

    def hook(_module: object, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        x = args[0]
        scale = x.float().abs().amax(-1, keepdim=True) / 448 if stored is None else stored
        return (rounded(x, scale),)

    assert inputs.granularity in ("token", "tensor")
    return hook


@torch.inference_mode()
def served(original: Path, checkpoint: Path, proofs: Proofs) -> list[Response]:
    """What a server in BF16 with a cache of 16 bits answers: W8A8 for FP8, weight-only for others.

    In blocks of FP8 it is weight-only too, as on GPUs without such a GEMM.
    """
    model = AutoModelForCausalLM.from_pretrained(original, dtype=torch.bfloat16)
    written = Written.open(checkpoint)
    assert written.quantization is not None
    for name, weight in decoded(checkpoint).items():
        module = model.get_submodule(name)
        module.weight.data = torch.from_numpy(weight).bfloat16()
        group = written.quantization.group_of(name)
        inputs = None if group is None else group.stored.inputs
        if inputs is not None and inputs.granularity != "group":
            scale = f"{name}.input_scale"
            stored = torch.from_numpy(written.values(scale)) if scale in written else None
            module.register_forward_pre_hook(rounds(inputs, stored))
    return answered(model, proofs)


@torch.inference_mode()
def answered(model: Any, proofs: Proofs) -> list[Response]:
    """What a server of a transformers model returns for the golden prompts."""
    found = []
    for number, record in enumerate(proofs.golden.records):
        after = len(record.tops)
        ids = [*record.prompt_token_ids, *record.continuation_token_ids[: after - 1]]
        logits = model(torch.tensor([ids])).logits[0, len(ids) - after :].double()
        top = logits.log_softmax(-1).topk(20)
        tops = tuple(
            dict(zip(i.tolist(), x.tolist(), strict=True))
            for i, x in zip(top.indices, top.values, strict=True)
        )
        found.append(Response(number, tuple(top.indices[:, 0].tolist()), tops))
    return found


def decoded(checkpoint: Path) -> dict[str, np.ndarray]:
    written = Written.open(checkpoint)
    modules = {name.rpartition(".")[0] for name in written.names if "_proj." in name}
    found = {module: written.dequantized(module) for module in modules}
    return {module: weight for module, weight in found.items() if weight is not None}


def judged(proofs: Proofs, responses: list[Response]) -> Verdict:
    declared = declared_paths(proofs.scenarios, proofs.recipe, proofs.kv_cache)
    return judge(proofs.golden, proofs.scenarios, declared, responses)


def swap_nibbles(tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype == "U8" and name.endswith((".weight", ".weight_packed")):
            tensors[name] = Tensor("U8", tensor.codes << 4 | tensor.codes >> 4)


def drop_scales(tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        if name.endswith((".weight_scale", ".weight_scale_inv")):
            tensors[name] = ones(tensor)


def drop_cache_scales(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.endswith((".k_scale", ".v_scale"))]:
        del tensors[name]


def exchange_cache_scales(tensors: Tensors) -> None:
    for key in [name for name in tensors if name.endswith(".k_scale")]:
        value = f"{key.removesuffix('k_scale')}v_scale"
        tensors[key], tensors[value] = tensors[value], tensors[key]


def ones(tensor: Tensor) -> Tensor:
    """Scales of 1, in their own dtype."""
    one = 0x3F80 if tensor.dtype == "BF16" else 1
    return Tensor(tensor.dtype, np.full_like(tensor.codes, one))


def share_global_scales(tensors: Tensors, choose: Callable[..., np.ndarray]) -> None:
    for group in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        for first in [x for x in tensors if x.endswith(f".{group[0]}.weight_scale_2")]:
            names = [first.replace(group[0], member) for member in group]
            scale = choose([tensors[name].codes.reshape(-1)[0] for name in names])
            for name in names:
                tensors[name] = Tensor("F32", np.full_like(tensors[name].codes, scale))


def load_one_slot(tensors: Tensors) -> None:
    """Of fused linears, only the first keeps a scale of the whole tensor."""
    for name in tensors:
        module, _, leaf = name.rpartition(".")
        alone = leaf in ("weight_scale", "weight_scale_2") and tensors[name].codes.size == 1
        if alone and module.endswith(("k_proj", "v_proj", "up_proj")):
            tensors[name] = ones(tensors[name])
