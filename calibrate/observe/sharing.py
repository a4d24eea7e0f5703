"""Linears that are taken by their names to read one tensor, held to it."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from octet.errors import UnsupportedError
from octet.model.spec import Linear

__all__ = ["require_shared_inputs"]


@contextmanager
def require_shared_inputs(layer: Any, prefix: str, linears: Iterable[Linear]) -> Iterator[None]:
    """While active, a linear of the decoder layer `prefix` that reads another tensor than the first
    with its `input` raises UnsupportedError: it would be served with scales of what it never reads.
    """
    last: dict[str, torch.Tensor] = {}

    def hook_of(linear: Linear) -> Any:
        def hook(_module: Any, args: tuple[torch.Tensor, ...]) -> None:
            first = linear.input.removesuffix(".input")
            if linear.name == first:
                last[first] = args[0]
            elif first not in last or last[first].data_ptr() != args[0].data_ptr():
                raise UnsupportedError(
                    f"{linear.name} does not read what {first} reads, as their names promise:"
                    " this architecture is not supported"
                )

        return hook

    with ExitStack() as stack:
        for linear in linears:
            module = layer.get_submodule(linear.name.removeprefix(f"{prefix}."))
            stack.enter_context(module.register_forward_pre_hook(hook_of(linear)))
        yield
