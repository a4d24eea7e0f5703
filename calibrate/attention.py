"""Queries where they enter attention, after RoPE: seen, or replaced, for one module at a time.

transformers 5 looks its attention functions up in one mapping by name; each may be overridden in
this process. The override is there only while a tap is.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

__all__ = ["tap_queries"]

_NAME = "sdpa"  # the implementation that `calibrate` loads every model with


@contextmanager
def tap_queries(module: nn.Module, tap: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """While active, attention `module` computes with `tap(query)` in place of query [B, H, T, D].

    Other modules compute as before. Where taps of one module are nested, the outer one is called
    last.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as functions

    inner = functions[_NAME]
    replaced = _NAME in functions._local_mapping

    def attend(caller: nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        return inner(caller, tap(query) if caller is module else query, *args, **kwargs)

    functions[_NAME] = attend
    try:
        yield
    finally:
        if replaced:
            functions[_NAME] = inner
        else:
            del functions[_NAME]
