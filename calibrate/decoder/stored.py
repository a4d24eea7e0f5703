"""A checkpoint's tensors as torch has them, copied when they are asked for."""

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from octet.model.checkpoint import Checkpoint
from octet.storage.tensors import Tensor

__all__ = ["Stored", "to_torch"]

# safetensors tag -> the torch dtype of the values, and of an integer of its size
_DTYPES = {
    "F64": (torch.float64, torch.int64),
    "F32": (torch.float32, torch.int32),
    "F16": (torch.float16, torch.int16),
    "BF16": (torch.bfloat16, torch.int16),
}


class Stored(Mapping[str, torch.Tensor]):
    """The tensors of a checkpoint below `prefix`, each copied in `dtype` whenever it is asked for.

    The pages that were read are released at once: those of a mapped file count as our memory.
    """

    def __init__(self, checkpoint: Checkpoint, prefix: str, dtype: torch.dtype) -> None:
        self._checkpoint, self._prefix, self._dtype = checkpoint, prefix, dtype
        self._names = [
            name.removeprefix(prefix)
            for name in checkpoint.tensor_names
            if name.startswith(prefix) and not name.endswith("rotary_emb.inv_freq")
        ]

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        copy = to_torch(self._checkpoint.read(f"{self._prefix}{name}"), self._dtype)
        self._checkpoint.release()
        return copy

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def to_torch(tensor: Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy of a stored floating tensor in `dtype`, on the CPU, in memory of its own."""
    stored, integer = _DTYPES[tensor.dtype]
    copy = torch.empty(tensor.shape, dtype=stored)
    raw = copy.view(integer).numpy()
    np.copyto(raw, tensor.codes.view(raw.dtype))
    return copy.to(dtype)
