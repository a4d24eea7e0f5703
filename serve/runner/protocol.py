"""Defines the interface of a runner, which computes one step of the model over cache slots."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from octet.errors import BackendError
from octet.model.spec import ModelSpec
from serve.runner.cache import CacheDtype, Slots

__all__ = ["CHUNK", "Runner", "RunnerLost", "StepBatch"]

# Prompt tokens prefilled in one step; some 60 ms on two cores for a model of 7 M parameters.
CHUNK = 256


@dataclass(frozen=True, slots=True)
class StepBatch:
    """New tokens for B requests, T each: T = 1 in decoding, B = 1 in prefill.

    `token_ids` int64 [B, T] follow the tokens in `slots` [B]. `logit_positions` int64 [B, L] are
    the indices into T whose logits are needed.
    """

    token_ids: NDArray[np.int64]
    slots: list[int]
    logit_positions: NDArray[np.int64]


class RunnerLost(BackendError):
    """The runner's device has failed: no later step in this process can succeed."""

    def __init__(self, message: str) -> None:
        super().__init__(message, kind="dead")


class Runner(Protocol):
    """Runs a model over a cache, which it makes in the memory where it computes.

    A row's logits must not depend on the other rows of its batch, with ONNX Runtime not in a single
    bit. A TensorRT engine may choose another kernel for another batch, whose sums round
    differently; serve/engine/golden_check.py reports whether an engine does.
    """

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def kv_dtype(self) -> CacheDtype: ...

    @property
    def slots(self) -> int:
        """Default number of requests that it decodes together."""

    def new_cache(self, slots: int, positions: int) -> Slots:
        """Makes a cache for `slots` requests of up to `positions` tokens.

        Raises ConfigError for sizes beyond the model or the memory.
        """

    def forward(self, step: StepBatch, cache: Any) -> NDArray[np.float32]:
        """Returns logits float32 [B, L, V]; appends the new keys and values to the slots.

        `cache` comes from `new_cache`. The next call may reuse the returned array. If it raises,
        the slots of this step are in an unknown state and must be released.
        """
