"""The interface of a runner, which computes one step of the model, and its key-value cache.

The cache has one slot per running request. `Slots` assigns slots to requests. A runner adds the
memory: `SlotCache` on the host, for ONNX Runtime, and serve/tensorrt/cache.py on a GPU. An E5M2
number is the top byte of an IEEE half, so decoding is one shift, done while the live windows of a
step's slots are gathered for the runner.

Unfilled positions are always zero: a masked position has probability 0, and 0 times a leftover NaN
would still be NaN.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from octet.errors import BackendError, ConfigError
from octet.model.spec import ModelSpec
from octet.numerics.bits import e5m2_to_float16
from octet.recipe import KvCacheDtype

__all__ = [
    "CHUNK",
    "WINDOW",
    "CacheDtype",
    "Runner",
    "RunnerLost",
    "SlotCache",
    "Slots",
    "StepBatch",
    "window",
]

CacheDtype: TypeAlias = KvCacheDtype

# Live windows end at multiples of this many positions, so that a row's sums are split over vector
# lanes in the same way, however long the longest row of its batch is.
WINDOW = 64


def window(length: int) -> int:
    """Returns `length` rounded up to a multiple of WINDOW."""
    return -(-length // WINDOW) * WINDOW


class Slots(ABC):
    """Slots for `slots` requests of up to `positions` tokens each, with their lengths.

    `lengths` int64 [slots] counts the filled positions of each slot, `tenants` int64 [slots] its
    past requests.
    """

    def __init__(self, spec: ModelSpec, slots: int, positions: int) -> None:
        """Raises ConfigError for no slots, or for more positions than the model has."""
        if slots < 1:
            raise ConfigError(f"slots must be at least 1, not {slots}")
        if not 1 <= positions <= spec.max_positions:
            raise ConfigError(
                f"the context must be 1 to {spec.max_positions} tokens (the model's), "
                f"not {positions}"
            )
        self.slots = slots
        self.positions = positions
        self.lengths = np.zeros(slots, np.int64)
        self.tenants = np.zeros(slots, np.int64)
        self._free = list(range(slots))[::-1]

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """Size of the keys and values of all slots."""

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def acquire(self) -> int | None:
        """Takes an empty slot, or returns None if all are taken."""
        return self._free.pop() if self._free else None

    def release(self, slot: int) -> None:
        """Empties `slot` and makes it available."""
        assert slot not in self._free
        self._clear(slot, int(self.lengths[slot]))
        self.lengths[slot] = 0
        self.tenants[slot] += 1
        self._free.append(slot)

    @abstractmethod
    def _clear(self, slot: int, length: int) -> None:
        """Zeroes the first `length` positions of `slot`."""


class SlotCache(Slots):
    """Keys and values in this process's memory.

    `codes` is uint8 (E5M2, E4M3) or uint16 (the bits of a float16), [slots, 2·layers, Hkv,
    positions, D]: the keys of layer i at index 2i, its values at 2i + 1.
    """

    def __init__(self, spec: ModelSpec, slots: int, positions: int, dtype: CacheDtype) -> None:
        """Raises ConfigError as `Slots` does."""
        super().__init__(spec, slots, positions)
        self.dtype = dtype
        shape = (slots, 2 * spec.layers, spec.kv_heads, window(positions), spec.head_dim)
        self.codes: NDArray[Any] = np.zeros(shape, np.uint16 if dtype == "float16" else np.uint8)

    @property
    def size_bytes(self) -> int:
        return self.codes.nbytes

    def _clear(self, slot: int, length: int) -> None:
        self.codes[slot, :, :, :length] = 0

    def read(self, slots: Sequence[int], out: NDArray[Any]) -> None:
        """Gathers the first positions of `slots` into `out` [2·layers, B, Hkv, window, D].

        `out` is float16 for decoded values (exact), or uint8 for E5M2 codes as they are.
        """
        live = out.shape[3]
        for row, slot in enumerate(slots):
            codes = self.codes[slot, :, :, :live]
            if self.dtype == "e5m2" and out.dtype == np.float16:
                e5m2_to_float16(codes, out=out[:, row])
            else:
                out.view(codes.dtype)[:, row] = codes

    def read_newest(self, slots: Sequence[int], out: NDArray[Any]) -> None:
        """Copies only the last filled position of each of `slots` to its place in `out`."""
        at = self.lengths[slots] - 1
        codes = self.codes[slots, :, :, at]  # [B, 2·layers, Hkv, D]
        rows = np.arange(len(slots))
        if self.dtype == "e5m2" and out.dtype == np.float16:
            out[:, rows, :, at] = e5m2_to_float16(codes)
        else:
            out.view(codes.dtype)[:, rows, :, at] = codes

    def append(self, slots: Sequence[int], rows: NDArray[Any]) -> None:
        """Appends new `rows` [2·layers, B, Hkv, T, D] (codes) to `slots`."""
        count = rows.shape[3]
        at = self.lengths[slots, None] + np.arange(count)  # [B, T]
        # Two index arrays around slices put their shared shape first: [B, T, 2·layers, Hkv, D].
        self.codes[np.asarray(slots)[:, None], :, :, at] = rows.transpose(1, 3, 0, 2, 4)
        self.lengths[slots] += count


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
