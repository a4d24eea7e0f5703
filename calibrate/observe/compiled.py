"""Compiles, with numba, the loops over arrays that numpy has no function for."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

__all__ = ["compiled", "inlined"]

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compiles `function` to machine code, cached on disk if a directory can be written.

    It runs without the interpreter's lock, so that threads may share a tensor's rows.
    """
    try:
        return cast(F, numba.njit(nogil=True, cache=True)(function))
    except RuntimeError:  # numba finds neither our folder nor the user's cache writable
        return cast(F, numba.njit(nogil=True)(function))


def inlined(function: F) -> F:
    """Prepares `function` for use in `compiled` ones, as if it were written where it is called."""
    return cast(F, numba.njit(inline="always")(function))
