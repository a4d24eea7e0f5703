"""A decoder that holds the weights of one layer at a time, computed by transformers' own modules.

The model is built on the meta device, where tensors have shapes and no memory. A layer's weights
are copied from the mapped shards when its turn comes and dropped afterwards. The model's own
`forward` runs, in which the other layers do nothing and there is no final norm. So RoPE, masks and
kernels are those of the resident model, and results are equal to the last bit. Embeddings are
gathered row by row, and the output head is applied to a slice of the vocabulary at a time.

Some decoders scale embeddings in `forward` before the first layer; this applies to layer 0's input
alone. Some models scale or cap logits; this applies to each slice.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from torch.func import functional_call
from transformers.modeling_outputs import MoeModelOutputWithPast

from calibrate.decoder.arithmetic import Float32Linear
from calibrate.decoder.loading import ComputeDtype, Stored, load_skeleton, to_torch
from calibrate.decoder.partial import Turn, some_layers
from calibrate.decoder.supported import check_make, window_of
from calibrate.decoder.weights import LayerWeights
from octet.errors import CheckpointError, UnsupportedError
from octet.model.checkpoint import Checkpoint
from octet.storage.tensors import Tensor

__all__ = ["LayeredModel"]

# Bytes of the output head that are applied at a time.
_HEAD_BYTES = {"cpu": 256 << 20, "cuda": 4 << 30}


class LayeredModel:
    """`checkpoint` in `dtype` on `device`, run layer by layer.

    `weights` may be shared with other models of the checkpoint; by default none are held.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: ComputeDtype,
        device: torch.device | str = "cpu",
        weights: LayerWeights | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.spec = checkpoint.spec
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.device = torch.device(device)
        self._model = load_skeleton(checkpoint, dtype)
        self._decoder = self._model.base_model
        norm = check_make(self._model, checkpoint)
        self._layers: list[Any] = list(self._decoder.layers)
        self._norm, self._input = getattr(self._decoder, norm), self._model.get_input_embeddings()
        self._names = {module: name for name, module in self._model.named_modules()}
        name = self._names[self._norm]
        self._fill(self._norm, name, Stored(checkpoint, f"{name}.", self.dtype))
        setattr(self._decoder, norm, nn.Identity())
        self._input.padding_idx = None  # may not be a row of `embed`'s partial table
        for module in self._decoder.modules():
            if module not in self._layers:
                self._compute_buffers(module)
        self._turn = Turn()
        self._weights = weights or LayerWeights(checkpoint, self.device, room=0)

    @property
    def module(self) -> Any:
        """The transformers model, of which only the layer in memory has weights."""
        return self._model

    @torch.inference_mode()
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Embeds int64 token ids [...], which are on the CPU.

        Returns [..., H] in the model's dtype, on its device.
        """
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
        """Yields each layer from `first` on as (index, module), with its weights while yielded."""
        for index in range(first, self.spec.layers):
            layer = self._layers[index]
            self._fill(layer, self.spec.layer(index), self._weights.read(index, self.dtype))
            for module in layer.modules():
                self._compute_buffers(module)
            self._decoder.layers = some_layers(self._layers, range(index, index + 1))
            with self._turn.of(index, layer):
                yield index, layer
            layer.to("meta")

    @torch.inference_mode()
    def forward(self, hidden: torch.Tensor, cache: Any, **kwargs: Any) -> torch.Tensor:
        """Runs [B, T, H] through the layer in memory and returns [B, T, H]; call it during a sweep.

        `cache` is a transformers cache, or None for one that is dropped; `kwargs` go to the model
        (`position_ids`, ...).
        """
        options = {"inputs_embeds": hidden, "past_key_values": cache, "use_cache": True, **kwargs}
        return self._run(hidden, partial(self._decoder, **options))

    def differentiable(
        self, hidden: torch.Tensor, parameters: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Runs [B, T, H] through the layer in memory and returns [B, T, H], with gradients.

        `parameters`, under their names in the checkpoint, take the place of the layer's own. Call
        it during a sweep.
        """
        prefix = f"{self._model.base_model_prefix}."
        own = {name.removeprefix(prefix): x for name, x in parameters.items()}
        options = {"inputs_embeds": hidden, "use_cache": False}
        return self._run(hidden, partial(functional_call, self._decoder, own, (), options))

    def _run(self, hidden: torch.Tensor, decode: Callable[[], Any]) -> torch.Tensor:
        with self._turn.given(hidden):
            decode()
        result = self._turn.result
        if result is None or result.shape != hidden.shape:
            raise UnsupportedError(
                f"{self.checkpoint.path}: a layer of {self.spec.architecture} does not make hidden"
                " states of hidden states: Octet cannot run it layer by layer"
            )
        return result

    def mask(self, visible: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Returns the mask [B, 1, 1, S] of the layer in memory, for one new token per row.

        `visible` bool [B, S] marks what the token may see of the cache, apart from the layer's
        window. `position` int64 [B] is the token's position. Both are on the CPU.
        """
        window = window_of(self._model, self.checkpoint, self._turn.index)
        if window is not None:
            visible = visible & (torch.arange(visible.shape[1]) > position[:, None] - window)
        mask = visible[:, None, None].to(self.device)
        if self._decoder.config._attn_implementation != "eager":
            return mask
        least = torch.finfo(self.dtype).min  # eager attention adds the mask
        return torch.zeros(mask.shape, dtype=self.dtype, device=mask.device).masked_fill(
            ~mask, least
        )

    @contextmanager
    def unscaled_rope(self, theta: float) -> Iterator[None]:
        """Gives RoPE the frequencies of base `theta`, without scaling, while active.

        The share of each head that rotates stays. For architectures that Octet knows.
        """
        before = self._decoder.rotary_emb
        config = deepcopy(before.config)
        share = {k: x for k, x in config.rope_parameters.items() if k.startswith("partial_")}
        config.rope_parameters = {"rope_type": "default", "rope_theta": theta, **share}
        self._decoder.rotary_emb = type(before)(config=config).to(self.device)
        try:
            yield
        finally:
            self._decoder.rotary_emb = before

    @torch.inference_mode()
    def logits(self, hidden: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Computes [1, n, V] from each [1, n, H] after the last layer: final norm and output head.

        The head is read once for all of them, a slice of the vocabulary at a time.
        """
        head = self._model.get_output_embeddings()
        tied = self._model.config.tie_word_embeddings
        name = self._names[self._input if tied else head]
        bias = None
        if head.bias is not None:
            bias = to_torch(self.checkpoint.read(f"{name}.bias"), self.dtype).to(self.device)
        normed = [self._norm(rows.to(self.device)) for rows in hidden]
        most = _HEAD_BYTES[self.device.type]
        step = max(1, most // (self.spec.hidden_size * self.dtype.itemsize))
        parts: list[list[torch.Tensor]] = [[] for _ in normed]
        with _decoder_replaced(self._model) as decoder:
            for start in range(0, self.spec.vocab_size, step):
                rows = slice(start, start + step)
                head.to("meta")  # frees the slice before
                weight = self._weights.rows(f"{name}.weight", rows, self.dtype)
                head.weight = _parameter(self._converted(head, weight))
                del weight
                if bias is not None:
                    head.bias = _parameter(bias[rows])
                for part, x in zip(parts, normed, strict=True):
                    decoder.output = x
                    part.append(self._model(inputs_embeds=x, use_cache=False).logits)
        head.to("meta")
        return [torch.cat(part, -1) if len(part) > 1 else part[0] for part in parts]

    def _fill(self, module: Any, name: str, weights: Mapping[str, torch.Tensor]) -> None:
        """Replaces `module`'s tensors on the meta device with its weights."""
        for key in module.state_dict():
            if key in weights:
                continue
            if self.spec.generic:  # its tensors' names and shapes are unchecked
                raise UnsupportedError(
                    f"{self.checkpoint.path}: {self.spec.architecture} has a tensor {name}.{key} in"
                    " transformers, but not in the checkpoint: an architecture whose tensors are"
                    " renamed is not supported"
                )
            raise CheckpointError(f"{self.checkpoint.path}: tensor {name}.{key} is missing")
        state = {
            key: self._converted(module.get_submodule(key.rpartition(".")[0]), weights[key])
            for key in module.state_dict()
        }
        module.load_state_dict(state, assign=True)

    def _converted(self, module: nn.Module, weight: torch.Tensor) -> torch.Tensor:
        """Returns a weight of `module` on the device, in the dtype that it is computed with.

        That is the model's dtype, except for a linear that multiplies BF16 as it is.
        """
        kept = isinstance(module, Float32Linear) and weight.is_cuda and weight.dim() > 1
        dtype = weight.dtype if kept and weight.dtype == torch.bfloat16 else self.dtype
        return weight.to(self.device, dtype)

    def _compute_buffers(self, module: nn.Module) -> None:
        """Computes `module`'s tensors that are not weights, such as RoPE's frequencies.

        transformers derives them from the configuration, on the CPU; so does this. Raises
        UnsupportedError if transformers leaves one of them out, as release 4 does.
        """
        missing = {
            name: torch.empty_like(buffer, device="cpu")
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.is_meta and name in module._non_persistent_buffers_set
        }
        if not missing:
            return
        module._buffers.update(missing)
        numbers = {n: x for n, x in missing.items() if x.is_floating_point() or x.is_complex()}
        for buffer in numbers.values():
            buffer.fill_(math.nan)  # shows what is not computed
        self._model._init_weights(module)
        for name, buffer in numbers.items():
            if buffer.isnan().any():
                raise UnsupportedError(
                    f"{self.checkpoint.path}: transformers {transformers.__version__} does not"
                    f" compute {self._names[module]}.{name} of {self.spec.architecture} for a model"
                    " that is read layer by layer: install transformers 5.7 or later"
                )
        module._buffers.update({name: x.to(self.device) for name, x in missing.items()})


class _Decoded(nn.Module):
    """Replaces the decoder and returns `output`, in a type that dense models read as well."""

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
