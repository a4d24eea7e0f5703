"""The key-value cache on a GPU: codes per slot, and the windows of them that an engine reads."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from octet.errors import BackendError
from octet.model.spec import ModelSpec
from serve.runner.protocol import Slots, window
from serve.tensorrt.gpu import Gpu, Memory, aligned
from serve.tensorrt.kernels import Arguments, Kernels

__all__ = ["DeviceCache", "Window"]


@dataclass
class Window:
    """The first `live` positions of some slots, [2·layers, B, Hkv, live, D] on the GPU.

    `stride` bytes lie between the addresses of two tensors. `held` names the content: a cache, and
    (slot, tenant, length) of each row; None if the content is not usable.
    """

    memory: Memory
    live: int = 0
    stride: int = 0
    held: "tuple[DeviceCache, tuple[tuple[int, int, int], ...]] | None" = None


class DeviceCache(Slots):
    """Codes on the GPU, [slots, 2·layers, Hkv, positions, D]: 1 byte each, or 2 for float16."""

    def __init__(
        self,
        spec: ModelSpec,
        slots: int,
        positions: int,
        *,
        gpu: Gpu,
        kernels: Kernels,
        item_bytes: int,
    ) -> None:
        """Raises ConfigError as `Slots` does, and for a cache beyond the GPU's free memory."""
        super().__init__(spec, slots, positions)
        self._gpu, self._kernels = gpu, kernels
        self._tensors, self._heads, self._dim = 2 * spec.layers, spec.kv_heads, spec.head_dim
        self._capacity = window(positions)
        self._head_bytes = self._capacity * spec.head_dim * item_bytes
        self._slot_bytes = self._tensors * self._heads * self._head_bytes
        self._item_bytes = item_bytes
        self._memory = Memory(gpu, slots * self._slot_bytes)
        gpu.zero(self._memory.address, pitch=self._slot_bytes, width=self._slot_bytes, height=slots)

    @property
    def size_bytes(self) -> int:
        return self.slots * self._slot_bytes

    def resize(self, window: Window, batch: int, live: int) -> None:
        """Makes room for the windows of `batch` rows of `live` positions; discards the content."""
        window.live, window.held = live, None
        window.stride = aligned(batch * self._heads * live * self._dim * self._item_bytes)
        size = self._tensors * window.stride
        if size > window.memory.nbytes:  # allocate spare room, because contexts get longer
            window.memory.reserve(size * 5 // 4)

    def is_in(self, window: Window, slots: Sequence[int]) -> bool:
        """Decides whether `window` already holds what `gather` would read."""
        return window.held is not None and window.held == (self, self._rows(slots))

    def gather(self, batch: int, where: int, into: Window) -> None:
        """Fills a window. `where` is the address of int64 [B, 2]: slots, and their lengths."""
        into.held = None
        self._kernels.gather(self._arguments(batch, where, into))

    def append(
        self, slots: Sequence[int], where: int, rows: int, stride: int, count: int, into: Window
    ) -> None:
        """Appends the new rows to each slot and to a window.

        `rows` is their address, [2·layers, B, Hkv, count, D]; `stride` elements lie between the
        rows of two tensors.
        """
        into.held = None
        arguments = self._arguments(len(slots), where, into)
        arguments.rows, arguments.count, arguments.rows_stride = rows, count, stride
        self._kernels.append(arguments)
        self.lengths[slots] += count
        into.held = (self, self._rows(slots))

    def _rows(self, slots: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
        return tuple((slot, int(self.tenants[slot]), int(self.lengths[slot])) for slot in slots)

    def _clear(self, slot: int, length: int) -> None:
        with suppress(BackendError):  # a GPU that fails here fails every later step too
            self._gpu.activate()
            self._gpu.zero(
                self._memory.address + slot * self._slot_bytes,
                pitch=self._head_bytes,
                width=length * self._dim * self._item_bytes,
                height=self._tensors * self._heads,
            )

    def _arguments(self, batch: int, where: int, into: Window) -> Arguments:
        return Arguments(
            slots=self._memory.address,
            window=into.memory.address if into.live else None,
            where=where,
            tensors=self._tensors,
            batch=batch,
            heads=self._heads,
            positions=self._capacity,
            live=into.live,
            dim=self._dim,
            window_stride=into.stride // self._item_bytes,
        )
