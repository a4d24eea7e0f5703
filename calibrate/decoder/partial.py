"""A transformers decoder that runs some of its layers alone, each at its own place in the stack.

The decoder's own `forward` numbers the layers it runs, and looks masks and position embeddings up
by that number: so a layer that shall not run leaves something in its place that does nothing.

The rest of a decoder, from one layer on, for what was computed once up to there.
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
    """In a layer's place: gives back what it is given, and has the layer's plain attributes."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        plain = (str, int, float, bool, type(None))
        for name, value in vars(layer).items():
            if not name.startswith("_") and name != "training" and isinstance(value, plain):
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states

    __call__ = forward  # there are no hooks; a deep model calls this more often than anything


class _Places(nn.ModuleList):
    """A slice is a plain list: every forward pass takes one."""

    def __getitem__(self, index: Any) -> Any:
        return list(self._modules.values())[index]


def some_layers(layers: Sequence[nn.Module], kept: range) -> nn.ModuleList:
    """`layers` of which those of `kept` alone do something."""
    return _Places(
        layer if index in kept else _Skipped(layer) for index, layer in enumerate(layers)
    )


@contextmanager
def run_layers(decoder: Any, kept: range) -> Iterator[None]:
    """While active, `decoder` runs the layers of `kept` alone; without its last norm unless they
    go to the end."""
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
    """The name of the norm after the last layer: what has weights besides layers and embeddings, or
    else a norm without any.

    ValueError names what else has, or says that there is no norm.
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
    """Whose turn it is: puts in what enters that layer, and takes what leaves it."""

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
        """Layer 0 reads what the decoder made of the embeddings, the others just what they are
        given: it would be scaled again."""
        if self._given is None or self.index == 0:
            return None
        if args:
            return (self._given, *args[1:]), kwargs
        return args, kwargs | {"hidden_states": self._given}

    def _leave(self, _layer: Any, _args: Any, output: Any) -> None:
        self.result = output[0] if isinstance(output, tuple) else output


class Tail:
    """What each batch is before decoder layer `layer`, and what the layers from there make of it.

    It holds one set of activations [B, T, H], in the model's dtype and on its device.
    """

    @torch.inference_mode()
    def __init__(self, model: Any, spec: ModelSpec, batches: Sequence[Batch]) -> None:
        """Before layer 0: the embeddings."""
        self.layer = 0
        self._model, self._spec, self._batches = model, spec, batches
        embed, device = model.get_input_embeddings(), model.device
        self._inputs: list[Tensor] = [embed(batch.token_ids.to(device)) for batch in batches]

    @torch.inference_mode()
    def move_to(self, layer: int) -> None:
        """Runs the model as it computes now up to before `layer`; it only goes forward."""
        if layer < self.layer:
            raise ValueError(f"before layer {self.layer} already, cannot go back to {layer}")
        with experts_one_by_one(self._model, self._spec):
            for index in range(self.layer, layer):
                with run_layers(self._model.base_model, range(index, index + 1)):
                    for at, x in enumerate(self._inputs):
                        self._inputs[at] = self._run(x)
        self.layer = layer

    def states(self, index: int, inputs: Tensor | None = None) -> Tensor:
        """The last hidden states [tokens, H] of batch `index`, as the model computes now.

        `inputs` [B, T, H] stand in for what the batch is before `layer`.
        """
        x = self._inputs[index] if inputs is None else inputs
        with run_layers(self._model.base_model, range(self.layer, self._spec.layers)):
            return real(self._run(x), self._batches[index])

    def _run(self, x: Tensor) -> Tensor:
        states: Tensor = self._model.base_model(inputs_embeds=x, use_cache=False).last_hidden_state
        return states
