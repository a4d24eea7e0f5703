"""Identifies what the counts of a run depend on: equal identities mean equal counts, to the bit."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch

from calibrate.decoder.arithmetic import bf16_matmuls
from calibrate.samples.batches import Batch
from octet.model.checkpoint import Checkpoint

__all__ = [
    "THREADS",
    "arithmetic_of",
    "device_name",
    "digest_of_batches",
    "run_identity",
    "setting_identity",
]

THREADS = "number of torch threads"


def run_identity(
    checkpoint: Checkpoint,
    batches: Sequence[Batch],
    dtype: str,
    device: torch.device,
    *,
    queries: bool = False,
) -> dict[str, str]:
    """Returns what the counts depend on, by name.

    The recipe is not included, except whether `queries` are counted, nor is the number of
    processes. Reads the whole checkpoint.
    """
    model = hashlib.sha256(json.dumps(checkpoint.weight_hashes, sort_keys=True).encode())
    model.update(checkpoint.changes_digest.encode())
    return {
        "model": model.hexdigest(),
        **setting_identity(batches, dtype, device, queries=queries),
    }


def setting_identity(
    batches: Sequence[Batch],
    dtype: str,
    device: torch.device,
    *,
    queries: bool,
) -> dict[str, str]:
    """Returns the part of `run_identity` that is known without reading the checkpoint."""
    import transformers

    identity = {
        "selection or length of samples": digest_of_batches(batches),
        "observation": "counts and mean squares",  # journals of 0.2 hold counts alone
        "compute dtype": dtype,
        "device": device_name(device),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if queries:
        identity["observation of queries"] = "yes"
    if device.type == "cpu":
        identity[THREADS] = str(torch.get_num_threads())
        if dtype == "bfloat16":
            identity["way to multiply BF16"] = bf16_matmuls()
    return identity


def digest_of_batches(batches: Sequence[Batch]) -> str:
    """Returns the SHA-256 of token ids, and of how they are batched."""
    samples = hashlib.sha256()
    for batch in batches:
        shape = tuple(batch.token_ids.shape)
        samples.update(repr((batch.chunk, batch.lengths, shape)).encode())
        samples.update(batch.token_ids.numpy().tobytes())
    return samples.hexdigest()


def arithmetic_of(device: torch.device) -> dict[str, Any]:
    """Returns what affects the last bits of a result on `device`, as an artifact records it."""
    found: dict[str, Any] = {
        "device": device_name(device),
        "torch_threads": torch.get_num_threads(),
    }
    return found | ({"bf16_matmuls": bf16_matmuls()} if device.type == "cpu" else {})


def device_name(device: torch.device) -> str:
    """Returns what arithmetic depends on: the GPU's name, or the CPU instructions torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({torch.backends.cpu.get_cpu_capability()})"
