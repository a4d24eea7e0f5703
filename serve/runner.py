"""What the engine asks of whatever runs the model: one step over some slots of the cache."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from octet.model import ModelSpec
from serve.cache import CacheDtype, SlotCache

__all__ = ["Runner", "StepBatch"]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """New tokens for B requests, T each: T = 1 when decoding, B = 1 when reading a prompt.

    `token_ids` int64 [B, T] follow what `slots` [B] hold. `logit_positions` int64 [B, L] are the
    indices into T whose logits are wanted.
    """

    token_ids: NDArray[np.int64]
    slots: list[int]
    logit_positions: NDArray[np.int64]


class Runner(Protocol):
    """A model that attends over a `SlotCache`.

    A row's logits must not depend, in any bit, on the other rows of its batch.
    """

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def kv_dtype(self) -> CacheDtype: ...

    def forward(self, step: StepBatch, cache: SlotCache) -> NDArray[np.float32]:
        """Logits float32 [B, L, V]; appends the new keys and values to the slots.

        The array may be reused by the next call. If it raises, the slots of this step are in an
        unknown state and fit only to be released.
        """
