"""A transformers decoder that runs some of its layers alone, each at its own place in the stack.

The decoder's own `forward` numbers the layers it runs, and looks masks and position embeddings up
by that number: so a layer that shall not run leaves something in its place that does nothing.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

__all__ = ["Turn", "find_norm", "run_layers", "some_layers"]


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
