"""Checkpoints that serve something else than they say: what admission has to find.

Each is written beside the right one, with the same configuration and the same names of tensors, as
a botched reload or a wrong directory leaves it.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from octet.numerics.bits import bf16_to_float32, float32_to_bf16
from octet.storage.tensors import Tensor, TensorFile, write_tensors

__all__ = ["fine_tune", "halve_weight_scales", "remove_key_scales", "scale_keys", "texts_of"]

WEIGHTS = "model.safetensors"
Change = Callable[[str, Tensor], Tensor | None]


def scale_keys(model: Path, out: Path, exponent: int) -> Path:
    """The BF16 checkpoint `model` with keys times 2^exponent and queries divided by it.

    Both are exact and their products are unchanged: it computes what `model` computes, bit for bit.
    But an E5M2 cache holds its keys only with a scale: those of the example reach 10, and 2^-16 is
    E5M2's least positive value; 57,344, less than 2^16, its greatest.
    """
    powers = {"k_proj": 2.0**exponent, "q_proj": 2.0**-exponent}

    def change(name: str, tensor: Tensor) -> Tensor:
        power = next((p for part, p in powers.items() if f".{part}." in name), None)
        if power is None:
            return tensor
        before = tensor.float32()
        after = float32_to_bf16(before * np.float32(power))
        if not np.array_equal(bf16_to_float32(after) / np.float32(power), before):
            raise ValueError(f"{name} times {power:g} is not exact in BF16")
        return Tensor("BF16", after)

    return _rewrite(model, out, change)


def remove_key_scales(export: Path, out: Path) -> Path:
    """The exported checkpoint without its `k_scale` tensors; ValueError if it has none."""
    if not any(name.endswith(".k_scale") for name in TensorFile.open(export / WEIGHTS).names):
        raise ValueError(f"{export} has no k_scale tensors")
    return _rewrite(export, out, lambda name, x: None if name.endswith(".k_scale") else x)


def halve_weight_scales(export: Path, out: Path, layer: int) -> Path:
    """The exported checkpoint with the weight scales of every linear of `layer` halved."""

    def change(name: str, tensor: Tensor) -> Tensor:
        if f".layers.{layer}." not in name or not name.endswith(".weight_scale"):
            return tensor
        return Tensor(tensor.dtype, tensor.codes * np.float32(0.5))

    return _rewrite(export, out, change)


def fine_tune(
    model: Path,
    out: Path,
    texts: Sequence[str],
    *,
    steps: int,
    learning_rate: float,
    batch: int = 8,
    length: int = 256,
) -> Path:
    """`model` trained on for some steps on `texts`: what the next version of it might be.

    Windows of `length` tokens, AdamW, float32; the same bytes from the same texts on one machine.
    """
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
    stream = torch.tensor([token for text in texts for token in tokenizer(text)["input_ids"]])
    optimizer = torch.optim.AdamW(network.parameters(), lr=learning_rate)
    for _ in range(steps):
        starts = torch.randint(len(stream) - length - 1, (batch,))
        ids = stream[starts[:, None] + torch.arange(length + 1)]
        logits = network(input_ids=ids[:, :-1]).logits  # [batch, length, V]
        F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    after = network.state_dict()

    def change(name: str, tensor: Tensor) -> Tensor:
        return Tensor(tensor.dtype, float32_to_bf16(after[name].numpy()))

    return _rewrite(model, out, change)


def _rewrite(source: Path, out: Path, change: Change) -> Path:
    """A copy of the checkpoint directory; tensors for which `change` returns None are left out."""
    shutil.copytree(source, out)
    file = TensorFile.open(source / WEIGHTS)
    changed = {name: change(name, file.read(name)) for name in file.names}
    kept = {name: tensor for name, tensor in changed.items() if tensor is not None}
    write_tensors(out / WEIGHTS, kept, {"format": "pt"})
    return out


def texts_of(samples: Path) -> list[str]:
    """The texts of a file of samples, one JSON object a line."""
    return [json.loads(line)["text"] for line in samples.read_text().splitlines()]
