"""A counter that counts nothing, for layers whose counts an earlier run has kept."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray

from calibrate.observe.channel_squares import SumOfSquares
from octet.artifacts.calibration import BINS

__all__ = ["Uncounted"]


class Uncounted:
    """A `Counter` without counts: the layer runs as it did when it was counted, to the last bit."""

    def add(
        self,
        slot: int,
        x: torch.Tensor,
        lengths: Sequence[int] | None = None,
        *,
        squares: bool = False,
    ) -> None:
        pass

    def beside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def bad(self) -> Callable[[], list[int]]:
        return list

    def counts(self) -> NDArray[np.int64]:
        return np.zeros((0, BINS), np.int64)  # it has no slots

    def squares(self) -> dict[int, SumOfSquares]:
        return {}

    def clear(self) -> None:
        pass

    def close(self) -> None:
        pass
