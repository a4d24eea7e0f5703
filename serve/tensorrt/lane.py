"""One optimization profile of an engine: an execution context, and buffers for the current shape.

In each step, one copy moves the token ids, positions and mask to the GPU, and one brings the logits
back. The windows of the cache that the engine reads are gathered on the GPU. While the same
requests keep decoding, the windows need only their newest row, which the previous step has added.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octet.errors import BackendError
from octet.model.spec import ModelSpec
from serve.runner.protocol import StepBatch, window
from serve.tensorrt.cache import DeviceCache, Window
from serve.tensorrt.gpu import Gpu, Memory, PinnedMemory, aligned
from serve.tensorrt.interface import Dtypes, Limits, caches_named

__all__ = ["Lane"]


@dataclass
class Lane:
    """One optimization profile: its execution context, and its buffers for one shape at a time."""

    engine: Any
    profile: int
    limits: Limits
    gpu: Gpu
    spec: ModelSpec
    dtypes: Dtypes
    log: Any  # TensorRT's
    context: Any = field(init=False)
    shape: tuple[int, int, int, int] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.context = self.engine.create_execution_context()
        if self.context is None:
            raise BackendError("TensorRT gave no execution context: the GPU may be out of memory")
        if not self.context.set_optimization_profile_async(self.profile, self.gpu.stream):
            raise BackendError(f"TensorRT refuses its own optimization profile {self.profile}")
        self.gpu.synchronize()
        self.window = Window(Memory(self.gpu))
        self._in, self._rows, self._logits = (Memory(self.gpu) for _ in range(3))
        self._staged, self._out = PinnedMemory(self.gpu), PinnedMemory(self.gpu)

    @property
    def usual(self) -> Limits:
        """Sizes that the profile was tuned for."""
        return Limits.of(self.engine, self.profile, usual=True)

    def run(self, step: StepBatch, cache: DeviceCache) -> NDArray[np.float32]:
        """Runs `step`; returns its logits [B, L, V], valid until the next call."""
        lengths = cache.lengths[step.slots]
        live = min(window(int(lengths.max())), self.limits.cached)
        batch, count = step.token_ids.shape
        self.prepare((batch, count, live, step.logit_positions.shape[1]), cache)
        self.fill(step, lengths)
        self.copy_in()
        if not cache.is_in(self.window, step.slots):
            cache.gather(batch, self.where_address, self.window)
        self.enqueue()
        stride = self._rows_stride // self.dtypes.present_bytes
        rows = self._rows.address
        cache.append(step.slots, self.where_address, rows, stride, count, self.window)
        self.copy_out()
        self.gpu.synchronize()
        return self.logits

    def prepare(self, shape: tuple[int, int, int, int], cache: DeviceCache) -> None:
        """Sets buffers and addresses for (B, T, S, L): rows, new tokens, cached tokens, logits."""
        if shape == self.shape:
            return
        self.shape = None
        batch, count, live, wanted = shape
        spec = self.spec
        self._lay_out_inputs(shape)
        cache.resize(self.window, batch, live)
        elements = batch * spec.kv_heads * count * spec.head_dim
        self._rows_stride = aligned(elements * self.dtypes.present_bytes)
        self._rows.reserve(2 * spec.layers * self._rows_stride)
        self._logits_bytes = 4 * batch * wanted * spec.vocab_size
        self._logits.reserve(self._logits_bytes)
        self._out.reserve(self._logits_bytes)
        self.logits = self._out.array(0, (batch, wanted, spec.vocab_size), np.float32)
        cached = (batch, spec.kv_heads, live, spec.head_dim)
        for index, (past, present) in enumerate(
            zip(caches_named(spec, "past_key_values"), caches_named(spec, "present"), strict=True)
        ):
            self._bind(past, self.window.memory.address + index * self.window.stride, cached)
            self._bind(present, self._rows.address + index * self._rows_stride)
        self._bind("logits", self._logits.address)
        self.shape = shape

    def copy_in(self) -> None:
        self.gpu.copy_in(self._in.address, self._staged, self._in_bytes)

    def enqueue(self) -> None:
        if not self.context.execute_async_v3(self.gpu.stream):
            reason = self.log.reason
            self.log.clear()
            raise BackendError(f"TensorRT did not run the step: {reason}")

    def copy_out(self) -> None:
        self.gpu.copy_out(self._out, self._logits.address, self._logits_bytes)

    def _lay_out_inputs(self, shape: tuple[int, int, int, int]) -> None:
        """Places all small inputs in one block of memory, so that one copy moves them."""
        batch, count, live, wanted = shape
        inputs: dict[str, tuple[tuple[int, ...], Any]] = {
            "input_ids": ((batch, count), self.dtypes.indices),
            "position_ids": ((batch, count), self.dtypes.indices),
            "logit_positions": ((batch, wanted), self.dtypes.indices),
            "attention_mask": ((batch, 1, count, live + count), np.bool_),
            "where": ((batch, 2), np.int64),
        }
        offsets, size = {}, 0
        for name, (dims, dtype) in inputs.items():
            offsets[name] = size
            nbytes = int(np.prod(dims)) * np.dtype(dtype).itemsize
            size += aligned(nbytes)
        self._staged.reserve(size)
        self._in.reserve(size)
        self._in_bytes = size
        views = {
            name: self._staged.array(offsets[name], dims, dtype)
            for name, (dims, dtype) in inputs.items()
        }
        self._ids, self._positions = views["input_ids"], views["position_ids"]
        self._wanted, self._mask = views["logit_positions"], views["attention_mask"]
        self._where = views["where"]
        self.where_address = self._in.address + offsets["where"]
        self._mask[:, :, :, live:] = np.tri(count, dtype=bool)
        self._cached, self._offsets = np.arange(live), np.arange(count)
        for name, (dims, _) in inputs.items():
            if name != "where":
                self._bind(name, self._in.address + offsets[name], dims)

    def fill(self, step: StepBatch, lengths: NDArray[np.int64]) -> None:
        """Writes the inputs on the host; `lengths` [B] are the cached tokens of each row."""
        self._ids[:] = step.token_ids
        self._wanted[:] = step.logit_positions
        np.add(lengths[:, None], self._offsets, out=self._positions, casting="same_kind")
        filled = self._cached < lengths[:, None]  # [B, S]
        self._mask[:, 0, :, : len(self._cached)] = filled[:, None]
        self._where[:, 0], self._where[:, 1] = step.slots, lengths

    def _bind(self, name: str, address: int, shape: tuple[int, ...] | None = None) -> None:
        """Sets a tensor's address, and for an input its shape."""
        taken = self.context.set_tensor_address(name, address)
        if taken and shape is not None:
            taken = self.context.set_input_shape(name, shape)
        if not taken:
            raise BackendError(f"TensorRT refuses {name} of shape {shape}: outside its profile")
