"""Runs some layers of a transformers decoder alone, each at its own place in the stack.

The decoder's own `forward` numbers the layers it runs, and looks up masks and position embeddings
by that number. A layer that must not run is therefore replaced by one that does nothing.

`Tail` runs the rest of a decoder, from one layer on, on activations computed once up to there.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from calibrate.decoder.experts import experts_one_by_one
from calibrate.samples.batches import Batch, real
from octet.model.spec import ModelSpec

__all__ = ["Tail", "Turn", "find_norm", "run_layers", "some_layers"]


class _Skipped(nn.Module):
    """Replaces a layer: returns its input unchanged, and has the layer's plain attributes."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        plain = (str, int, float, bool, type(None))
        for name, value in vars(layer).items():
            if not name.startswith("_") and name != "training" and isinstance(value, plain):
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states

    __call__ = forward  # no hooks to run, and a deep model calls this most often


class _Places(nn.ModuleList):
    """A ModuleList whose slices are plain lists, because every forward pass takes one."""

    def __getitem__(self, index: Any) -> Any:
        return list(self._modules.values())[index]


def some_layers(layers: Sequence[nn.Module], kept: range) -> nn.ModuleList:
    """Returns `layers` with those outside `kept` replaced by layers that do nothing."""
    return _Places(
        layer if index in kept else _Skipped(layer) for index, layer in enumerate(layers)
    )


@contextmanager
def run_layers(decoder: Any, kept: range) -> Iterator[None]:
    """While active, `decoder` runs only the layers of `kept`.

    Its last norm is left out unless they go to the end.
    """
    layers, name = decoder.layers, find_norm(decoder)
    norm = getattr(decoder, name)
    decoder.layers = some_layers(layers, kept)
    if kept.stop < len(layers):
        setattr(decoder, name, nn.Identity())
    try:
        yield
    finally:
        decoder.layers = layers
        setattr(decoder, name, norm)


def find_norm(decoder: nn.Module) -> str:
    """Returns the name of the norm after the last layer.

    It is the only child with weights besides layers and embeddings, or else the only norm without
    weights. Raises ValueError that names what else has weights, or says that there is no norm.
    """
    others = {
        name: next(child.parameters(), None) is not None
        for name, child in decoder.named_children()
        if name != "layers" and not isinstance(child, nn.Embedding)
    }
    found = [name for name, has_weights in others.items() if has_weights]
    found = found or [name for name in others if "norm" in name]
    if len(found) != 1 or "norm" not in found[0]:
        raise ValueError(f"besides layers and embeddings there is {', '.join(found) or 'nothing'}")
    return found[0]


class Turn:
    """Feeds the layer whose turn it is with given hidden states, and captures its output."""

    def __init__(self) -> None:
        self.index = 0
        self.result: Tensor | None = None
        self._given: Tensor | None = None

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
    def given(self, hidden: Tensor) -> Iterator[None]:
        self._given, self.result = hidden, None
        try:
            yield
        finally:
            self._given = None

    def _enter(self, _layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replaces the layer's input with the given hidden states, except at layer 0.

        Layer 0 reads what the decoder made of the embeddings. The input of any other layer is
        replaced, because the decoder may have scaled it again.
        """
        if self._given is None or self.index == 0:
            return None
        if args:
            return (self._given, *args[1:]), kwargs
        return args, kwargs | {"hidden_states": self._given}

    def _leave(self, _layer: Any, _args: Any, output: Any) -> None:
        self.result = output[0] if isinstance(output, tuple) else output


class Tail:
    """Hidden states entering `layer`, and the forward pass through the remaining layers.

    It holds one set of activations, [B, T, H] for each batch, in the model's dtype and on its
    device.
    """

    @torch.inference_mode()
    def __init__(self, model: Any, spec: ModelSpec, batches: Sequence[Batch]) -> None:
        """Starts before layer 0, with the embeddings."""
        self.layer = 0
        self._model, self._spec, self._batches = model, spec, batches
        embed, device = model.get_input_embeddings(), model.device
        self._inputs: list[Tensor] = [embed(batch.token_ids.to(device)) for batch in batches]

    @torch.inference_mode()
    def move_to(self, layer: int) -> None:
        """Runs the model, as it computes now, up to the input of `layer`.

        Raises ValueError for a `layer` before the current one.
        """
        if layer < self.layer:
            raise ValueError(f"before layer {self.layer} already, cannot go back to {layer}")
        with experts_one_by_one(self._model, self._spec):
            for index in range(self.layer, layer):
                with run_layers(self._model.base_model, range(index, index + 1)):
                    for at, x in enumerate(self._inputs):
                        self._inputs[at] = self._run(x)
        self.layer = layer

    def states(self, index: int, inputs: Tensor | None = None) -> Tensor:
        """Returns the last hidden states [tokens, H] of batch `index`, as the model computes now.

        `inputs` [B, T, H] replace the batch's hidden states entering `layer`.
        """
        x = self._inputs[index] if inputs is None else inputs
        with run_layers(self._model.base_model, range(self.layer, self._spec.layers)):
            return real(self._run(x), self._batches[index])

    def _run(self, x: Tensor) -> Tensor:
        states: Tensor = self._model.base_model(inputs_embeds=x, use_cache=False).last_hidden_state
        return states
