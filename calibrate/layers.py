"""A decoder that holds the weights of one layer at a time, computed by transformers' own modules.

The model is built on the meta device, where tensors have shapes and no memory. A layer's weights
are copied from the mapped shards when its turn comes and dropped after it; what runs is the
model's own `forward`, in which the other layers do nothing and there is no final norm. So RoPE,
masks and kernels are those of the resident model, and results are equal to the last bit. Embeddings
are gathered row by row, and the output head is applied to a slice of the vocabulary at a time.

What the decoder's `forward` does to embeddings before the first layer (some scale them) is done to
layer 0's input alone; what the model's does to logits (some scale or cap them), to each slice.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from calibrate.experts import assemble
from calibrate.loading import ComputeDtype, load_skeleton
from calibrate.stack import find_norm, some_layers
from octet.checkpoint import Checkpoint
from octet.errors import CheckpointError, UnsupportedError
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
        self.checkpoint = checkpoint
        self.spec = checkpoint.spec
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.device = torch.device(device)
        self._model = load_skeleton(checkpoint, dtype)
        self._decoder = self._model.base_model
        norm = self._check_make()
        self._layers: list[Any] = list(self._decoder.layers)
        self._norm, self._input = getattr(self._decoder, norm), self._model.get_input_embeddings()
        self._names = {module: name for name, module in self._model.named_modules()}
        name = self._names[self._norm]
        self._fill(self._norm, name, _Stored(checkpoint, f"{name}.", self.dtype))
        setattr(self._decoder, norm, nn.Identity())
        self._input.padding_idx = None  # it would have to be a row of a table of some rows
        for module in self._decoder.modules():
            if module not in self._layers:
                self._compute_buffers(module)
        self._turn = _Turn()
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
        table = self.checkpoint.read(f"{self._names[self._input]}.weight")
        ids, places = torch.unique(token_ids, return_inverse=True)  # each row is read once
        rows = Tensor(table.dtype, table.codes[ids.numpy()])
        self.checkpoint.release()
        whole = self._input.weight
        try:
            self._input.weight = _parameter(to_torch(rows, self.dtype).to(self.device))
            embedded: torch.Tensor = self._input(places.to(self.device))
            return embedded
        finally:
            self._input.weight = whole

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
                for module in layer.modules():
                    self._compute_buffers(module)
                self._decoder.layers = some_layers(self._layers, range(index, index + 1))
                with self._turn.of(index, layer):
                    yield index, layer
                layer.to("meta")
        finally:
            if ahead is not None:
                ahead.shutdown(cancel_futures=True)

    @torch.inference_mode()
    def forward(self, hidden: torch.Tensor, cache: Any, **kwargs: Any) -> torch.Tensor:
        """[B, T, H] to [B, T, H] through the layer that is in memory; to be called in a sweep.

        `cache` is a transformers cache, None for one that is dropped; `kwargs` go to the model
        (`position_ids`, ...).
        """
        with self._turn.given(hidden):
            self._decoder(inputs_embeds=hidden, past_key_values=cache, use_cache=True, **kwargs)
        result = self._turn.result
        if result is None or result.shape != hidden.shape:
            raise UnsupportedError(
                f"{self.checkpoint.path}: a layer of {self.spec.architecture} does not make hidden"
                " states of hidden states: Octet cannot run it layer by layer"
            )
        return result

    def mask(self, visible: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """The attention mask [B, 1, 1, S] of the layer that is in memory, for one new token a row.

        `visible` bool [B, S] is what the token may see of the cache, apart from the layer's
        window; `position` int64 [B], that of the token. Both on the CPU.
        """
        window = self._window(self._turn.index)
        if window is not None:
            visible = visible & (torch.arange(visible.shape[1]) > position[:, None] - window)
        mask = visible[:, None, None].to(self.device)
        if self._decoder.config._attn_implementation != "eager":
            return mask
        least = torch.finfo(self.dtype).min  # which it adds
        return torch.zeros(mask.shape, dtype=self.dtype, device=mask.device).masked_fill(
            ~mask, least
        )

    @torch.inference_mode()
    def logits(self, hidden: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Each [1, n, V] of [1, n, H] after the last layer: final norm, then the output head.

        The head is read once for all of them, a slice of the vocabulary at a time.
        """
        head = self._model.get_output_embeddings()
        tied = self._model.config.tie_word_embeddings
        name = self._names[self._input if tied else head]
        stored = self.checkpoint.read(f"{name}.weight")
        bias = None
        if head.bias is not None:
            bias = to_torch(self.checkpoint.read(f"{name}.bias"), self.dtype).to(self.device)
        normed = [self._norm(rows.to(self.device)) for rows in hidden]
        step = max(1, _HEAD_BYTES // (self.spec.hidden_size * self.dtype.itemsize))
        parts: list[list[torch.Tensor]] = [[] for _ in normed]
        with _decoder_replaced(self._model) as decoder:
            for start in range(0, self.spec.vocab_size, step):
                rows = Tensor(stored.dtype, stored.codes[start : start + step])
                head.weight = _parameter(to_torch(rows, self.dtype).to(self.device))
                if bias is not None:
                    head.bias = _parameter(bias[start : start + step])
                self.checkpoint.release()
                for part, x in zip(parts, normed, strict=True):
                    decoder.output = x
                    part.append(self._model(inputs_embeds=x, use_cache=False).logits)
        head.to("meta")
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

    def _check_make(self) -> str:
        """The name of the decoder's last norm; UnsupportedError if it is not a stack of layers
        between embeddings and a norm, with the linears of `spec`."""
        spec, path = self.spec, self.checkpoint.path
        whole = f"{path}: {spec.architecture} cannot be run layer by layer: "
        prefix = f"{self._model.base_model_prefix}.layers"
        if not isinstance(getattr(self._decoder, "layers", None), nn.ModuleList):
            raise UnsupportedError(f"{whole}its decoder has no stack of layers")
        if prefix != spec.prefix or len(self._decoder.layers) != spec.layers:
            raise UnsupportedError(
                f"{whole}transformers has {len(self._decoder.layers)} layers in {prefix}, the"
                f" checkpoint {spec.layers} in {spec.prefix}"
            )
        try:
            norm = find_norm(self._decoder)
        except ValueError as error:
            raise UnsupportedError(f"{whole}{error}, where a norm was expected") from None
        if spec.generic:
            for linear in spec.linears():
                self._check_linear(linear.name, (linear.out_features, linear.in_features), whole)
            for index in range(spec.layers):
                self._window(index)
        return norm

    def _check_linear(self, name: str, shape: tuple[int, int], whole: str) -> None:
        try:
            module = self._model.get_submodule(name)
        except AttributeError:
            module = None
        if not isinstance(module, nn.Linear) or tuple(module.weight.shape) != shape:
            raise UnsupportedError(
                f"{whole}{name}.weight is no linear's weight of {list(shape)} in transformers"
            )

    def _window(self, index: int) -> int | None:
        """How many tokens layer `index` sees, itself among them; None for all."""
        if not self.spec.generic:
            return self.spec.sliding_window if index in self.spec.sliding_layers else None
        config = self._decoder.config
        window: int | None = getattr(config, "sliding_window", None)
        kinds = getattr(config, "layer_types", None)
        if kinds is None:  # then all or none, and only a file that can make the mask means it
            source = sys.modules[type(self._decoder).__module__]
            return window if hasattr(source, "create_sliding_window_causal_mask") else None
        if kinds[index] not in ("full_attention", "sliding_attention"):
            raise UnsupportedError(
                f"{self.checkpoint.path}: layer {index} is of type '{kinds[index]}'; Octet runs"
                " 'full_attention' and 'sliding_attention'"
            )
        return window if kinds[index] == "sliding_attention" else None

    def _compute_buffers(self, module: nn.Module) -> None:
        """Gives `module` the tensors that are not weights, such as RoPE's frequencies, which
        transformers computes from the configuration; on the CPU, as it does."""
        missing = {
            name: torch.empty_like(buffer, device="cpu")
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.is_meta and name in module._non_persistent_buffers_set
        }
        if not missing:
            return
        module._buffers.update(missing)
        self._model._init_weights(module)
        module._buffers.update({name: x.to(self.device) for name, x in missing.items()})


class _Turn:
    """Whose turn it is: puts in what enters that layer, and takes what leaves it."""

    def __init__(self) -> None:
        self.index = 0
        self.result: torch.Tensor | None = None
        self._given: torch.Tensor | None = None

    @contextmanager
    def of(self, index: int, layer: nn.Module) -> Iterator[None]:
        self.index = index
        handles = [
            layer.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True),
            layer.register_forward_hook(self._leave),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def given(self, hidden: torch.Tensor) -> Iterator[None]:
        self._given, self.result = hidden, None
        try:
            yield
        finally:
            self._given = None

    def _enter(self, _layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Layer 0 reads what the decoder made of the embeddings, the others just what they are
        given: it would be scaled again."""
        if self._given is None or self.index == 0:
            return None
        if args:
            return (self._given, *args[1:]), kwargs
        return args, kwargs | {"hidden_states": self._given}

    def _leave(self, _layer: Any, _args: Any, output: Any) -> None:
        self.result = output[0] if isinstance(output, tuple) else output


class _Decoded(nn.Module):
    """In the decoder's place: gives what is to be its output, which a dense model reads alike."""

    output: torch.Tensor

    def forward(self, *_: Any, **__: Any) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=self.output)


@contextmanager
def _decoder_replaced(model: Any) -> Iterator[_Decoded]:
    name, decoder = model.base_model_prefix, _Decoded()
    before = getattr(model, name)
    setattr(model, name, decoder)
    try:
        yield decoder
    finally:
        setattr(model, name, before)


def _parameter(value: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)


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
