"""A decoder that holds the weights of one layer at a time, computed by transformers' own modules.

The model is built on the meta device, where tensors have shapes and no memory. A layer's weights
are copied from the mapped shards when its turn comes and dropped after it; what runs is the
model's own `forward`, told that it has this layer alone and no final norm. So RoPE, masks and
kernels are those of the resident model, and results are equal to the last bit. Embeddings are
gathered row by row, and the output head is applied to a slice of the vocabulary at a time.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from calibrate.experts import assemble
from calibrate.loading import ComputeDtype, load_config, quiet
from octet.checkpoint import Checkpoint
from octet.errors import CheckpointError
from octet.tensors import Tensor

__all__ = ["LayeredModel", "to_torch"]

_HEAD_BYTES = 256 << 20  # of the output head in memory at a time

# safetensors tag -> the torch dtype of the values, and of an integer of its size
_DTYPES = {
    "F64": (torch.float64, torch.int64),
    "F32": (torch.float32, torch.int32),
    "F16": (torch.float16, torch.int16),
    "BF16": (torch.bfloat16, torch.int16),
}


class LayeredModel:
    """`checkpoint` in `dtype` on `device`, swept layer by layer; everything runs without gradients.

    Decoder layers that all together fit in `keep_bytes` stay in memory between sweeps.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: ComputeDtype,
        device: torch.device | str = "cpu",
        *,
        keep_bytes: int = 0,
    ) -> None:
        from transformers import AutoModel

        self.checkpoint = checkpoint
        self.spec = checkpoint.spec
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.device = torch.device(device)
        with quiet(), torch.device("meta"):
            self._decoder = AutoModel.from_config(
                load_config(checkpoint), dtype=self.dtype, attn_implementation="sdpa"
            ).eval()
        self._layers: list[Any] = list(self._decoder.layers)
        self._norm = self._decoder.norm
        self._fill(self._norm, "model.norm", _Stored(checkpoint, "model.norm.", self.dtype))
        self._decoder.norm = torch.nn.Identity()
        # Not a weight, but computed from the configuration, on the CPU as transformers does.
        rotary = type(self._decoder.rotary_emb)(config=self._decoder.config)
        self._decoder.rotary_emb = rotary.to(self.device)
        self._kept: list[dict[str, torch.Tensor]] | None = None
        if self.parameters * self.dtype.itemsize <= keep_bytes:
            self._kept = [self._read(index) for index in range(self.spec.layers)]

    @property
    def parameters(self) -> int:
        """How many the decoder layers have."""
        return sum(x.numel() for layer in self._layers for x in layer.parameters())

    @torch.inference_mode()
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[..., H] in the model's dtype, on its device, of int64 token ids [...] on the CPU."""
        table = self.checkpoint.read("model.embed_tokens.weight")
        ids, places = torch.unique(token_ids, return_inverse=True)  # each row is read once
        rows = Tensor(table.dtype, table.codes[ids.numpy()])
        self.checkpoint.release()
        return to_torch(rows, self.dtype).to(self.device)[places.to(self.device)]

    def sweep(self, first: int = 0) -> Iterator[tuple[int, Any]]:
        """Each layer from `first` on, as (index, module), with its weights while it is yielded.

        With a GPU, the next layer is read from disk meanwhile.
        """
        indices = range(first, self.spec.layers)
        ahead = ThreadPoolExecutor(1, "octet-read") if self.device.type != "cpu" else None
        try:
            following = ahead.submit(self._read, first) if ahead and indices else None
            for index in indices:
                weights = following.result() if following else self._read(index)
                layer = self._layers[index]
                self._fill(layer, self.spec.layer(index), weights)
                del weights
                if ahead and index + 1 in indices:
                    following = ahead.submit(self._read, index + 1)
                self._decoder.layers = torch.nn.ModuleList([layer])
                yield index, layer
                layer.to("meta")
        finally:
            if ahead is not None:
                ahead.shutdown(cancel_futures=True)

    @torch.inference_mode()
    def forward(self, hidden: torch.Tensor, cache: Any, **kwargs: Any) -> torch.Tensor:
        """[B, T, H] to [B, T, H] through the layer that is in memory; to be called in a sweep.

        `cache` is a transformers cache; `kwargs` go to the model (`position_ids`, ...).
        """
        output = self._decoder(
            inputs_embeds=hidden, past_key_values=cache, use_cache=True, **kwargs
        )
        result: torch.Tensor = output.last_hidden_state
        return result

    @torch.inference_mode()
    def logits(self, hidden: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Each [1, n, V] of [1, n, H] after the last layer: final norm, then the output head.

        The head is read once for all of them, a slice of the vocabulary at a time.
        """
        tied = self.spec.tied_embeddings
        head = self.checkpoint.read("model.embed_tokens.weight" if tied else "lm_head.weight")
        normed = [self._norm(rows.to(self.device)) for rows in hidden]
        step = max(1, _HEAD_BYTES // (self.spec.hidden_size * self.dtype.itemsize))
        parts: list[list[torch.Tensor]] = [[] for _ in normed]
        for start in range(0, self.spec.vocab_size, step):
            rows = Tensor(head.dtype, head.codes[start : start + step])
            weight = to_torch(rows, self.dtype).to(self.device)
            self.checkpoint.release()
            for part, x in zip(parts, normed, strict=True):
                part.append(torch.nn.functional.linear(x, weight))
        return [torch.cat(part, -1) if len(part) > 1 else part[0] for part in parts]

    def _read(self, index: int) -> dict[str, torch.Tensor]:
        """The weights of a layer, on the CPU, by the names of its module's parameters."""
        if self._kept is not None:
            return self._kept[index]
        return assemble(_Stored(self.checkpoint, f"{self.spec.layer(index)}.", self.dtype))

    def _fill(self, module: Any, name: str, weights: Mapping[str, torch.Tensor]) -> None:
        """Gives `module` its weights, in place of tensors on the meta device."""
        for key in module.state_dict():
            if key not in weights:
                raise CheckpointError(f"{self.checkpoint.path}: tensor {name}.{key} is missing")
        state = {key: weights[key].to(self.device) for key in module.state_dict()}
        module.load_state_dict(state, assign=True)


class _Stored(Mapping[str, torch.Tensor]):
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
