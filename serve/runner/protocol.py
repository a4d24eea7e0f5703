"""What the engine asks of whatever runs the model: one step over some slots of the cache."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from octet.errors import BackendError
from octet.model.spec import ModelSpec
from serve.runner.cache import CacheDtype, Slots

__all__ = ["CHUNK", "Runner", "RunnerLost", "StepBatch"]

# Prompt tokens read in one step; on two cores some 60 ms of a 7 M parameter model.
CHUNK = 256


@dataclass(frozen=True, slots=True)
class StepBatch:
    """New tokens for B requests, T each: T = 1 when decoding, B = 1 when reading a prompt.

    `token_ids` int64 [B, T] follow what `slots` [B] hold. `logit_positions` int64 [B, L] are the
    indices into T whose logits are wanted.
    """

    token_ids: NDArray[np.int64]
    slots: list[int]
    logit_positions: NDArray[np.int64]


class RunnerLost(BackendError):
    """What the runner computes on has failed: no later step in this process can succeed."""

    def __init__(self, message: str) -> None:
        super().__init__(message, kind="dead")


class Runner(Protocol):
    """A model that attends over a cache, which it makes: in the memory where it computes.

    A row's logits must not depend on the other rows of its batch: in no bit with ONNX Runtime. A
    TensorRT engine may take another kernel for another batch, whose sums round otherwise;
    serve/engine/golden_check.py says whether this one does.
    """

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def kv_dtype(self) -> CacheDtype: ...

    @property
    def slots(self) -> int:
        """How many requests it decodes together if nobody says otherwise."""

    def new_cache(self, slots: int, positions: int) -> Slots:
        """A cache for `slots` requests of up to `positions` tokens.

        Raises ConfigError for sizes that the model, or the memory, does not have.
        """

    def forward(self, step: StepBatch, cache: Any) -> NDArray[np.float32]:
        """Logits float32 [B, L, V]; appends the new keys and values to the slots.

        `cache` is one of `new_cache`'s. The array may be reused by the next call. If it raises,
        the slots of this step are in an unknown state and fit only to be released.
        """
