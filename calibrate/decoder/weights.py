"""Holds the weights of decoder layers that fit into memory, and reads the others ahead of time.

On a GPU, tensors keep the checkpoint's dtypes: a layer is converted when its turn comes, on the
GPU, which takes less time than reading it. Layers that do not fit are read by several threads into
pinned memory and copied while earlier layers compute. On a CPU, layers are held as they are
computed with, if all of them fit.
"""

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

import torch

from calibrate.decoder.experts import assemble
from calibrate.decoder.loading import Stored, empty_like_stored, to_torch
from octet.errors import ConfigError
from octet.hardware.cores import usable_cores
from octet.hardware.memory import available_memory
from octet.model.checkpoint import Checkpoint
from octet.storage.tensors import Tensor

__all__ = ["LayerWeights", "free_memory", "full_gpu", "return_freed"]

_CPU_BYTES = 1 << 30
_AHEAD = 4  # layers that are read before their turn: a dozen large tensors, each by one thread
_READERS = 16  # threads, at most

# A GPU's memory that is not used to hold layers.
_SHARE, _SHARE_BYTES = 0.2, 24 << 30  # for activations: this share, at most so many bytes
_COPIES = 4  # layers in other dtypes: converted to float32, and with quantized weights
_HEADS = 3  # copies of the output head

R = TypeVar("R")
_Copied: TypeAlias = tuple[str, torch.Tensor, torch.cuda.Event]


def free_memory(device: torch.device) -> int:
    """Returns how many bytes of a GPU, or of main memory, this process can still allocate."""
    if device.type != "cuda":
        return available_memory()
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def return_freed() -> None:
    """Returns freed memory of the CPU to the system, of which glibc's malloc keeps up to all."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def full_gpu(remedy: str) -> Iterator[None]:
    """Raises ConfigError, with `remedy`, if a GPU's memory is full and nothing can be freed."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        phases = getattr(error, "__notes__", ())
        where = f" in {phases[0]!r}" if phases else ""
        raise ConfigError(f"{_reason(error)}{where}: {remedy}") from None


def _reason(error: torch.OutOfMemoryError) -> str:
    """Returns the first sentence of torch's message, without the statistics after it."""
    return str(error).partition(". ")[0]


class LayerWeights:
    """The decoder layers of `checkpoint`, on `device` when they are requested.

    One object serves all models of a checkpoint, so that a layer is read once for all of them. It
    holds up to `room` bytes of layers, by default as many as fit: on a GPU the first ones, on a CPU
    all or none in each dtype. `say` is called with a line if that has to change.

    Raises ConfigError if a GPU has too little free memory for one layer.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device | str = "cpu",
        *,
        room: int | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.checkpoint, self.device, self._say = checkpoint, torch.device(device), say
        spec = checkpoint.spec
        self._names = [
            [f"{spec.layer(index)}.{name}" for name in self._stored(index, torch.float32)]
            for index in range(spec.layers)
        ]
        self._sizes = [sum(map(checkpoint.nbytes, names)) for names in self._names]
        self._values = sum(math.prod(checkpoint.shape(x)) for names in self._names for x in names)
        self._held: dict[tuple[int, torch.dtype | None], dict[str, torch.Tensor]] = {}
        self._whole: dict[str, torch.Tensor] = {}  # tensors outside the layers, by name
        self._last: tuple[int, dict[str, torch.Tensor]] | None = None  # read, and not held
        self._prefetched: dict[int, list[Future[_Copied]]] = {}
        self._resident = 0
        self._most = self._room() if room is None else room
        if self.device.type == "cuda":
            room = self._most
            while self._resident < spec.layers and self._sizes[self._resident] <= room:
                room -= self._sizes[self._resident]
                self._resident += 1
            self._pool = ThreadPoolExecutor(min(_READERS, usable_cores()), "octet-read")
            self._stream: Any = torch.cuda.Stream(self.device)

    @property
    def resident_bytes(self) -> int:
        """Bytes of the layers that stay on a GPU once they were read."""
        return sum(self._sizes[: self._resident])

    def __str__(self) -> str:
        """Describes in one line where the layers are held."""
        total, layers = sum(self._sizes), len(self._sizes)
        if self._resident == layers:
            return f"weights: {_gb(total)}, held in GPU memory"
        if not self._resident:
            return f"weights: {_gb(total)}, read from disk layer by layer for every pass"
        return (
            f"weights: {_gb(self.resident_bytes)} of {_gb(total)} held in GPU memory"
            f" ({self._resident} of {layers} layers), the rest read from disk for every pass"
        )

    def read(self, index: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Returns a layer's weights, under the names of its module's parameters.

        They are in `dtype`, or on a GPU in the checkpoint's dtypes.
        """
        if self.device.type == "cuda":
            return self._on_gpu(index)
        weights = self._held.get((index, dtype))
        if weights is None:
            weights = {
                k: x.to(self.device) for k, x in assemble(self._stored(index, dtype)).items()
            }
            if self._values * dtype.itemsize <= self._most:
                self._held[index, dtype] = weights
        return weights

    def weight(self, name: str) -> torch.Tensor | None:
        """Returns a layer's tensor in the checkpoint's dtype; None for an expert's or on a CPU."""
        if self.device.type != "cuda":
            return None
        module, _, rest = name.removeprefix(f"{self.checkpoint.spec.prefix}.").partition(".")
        return self._on_gpu(int(module)).get(rest)

    def rows(self, name: str, part: slice, dtype: torch.dtype) -> torch.Tensor:
        """Returns rows of a tensor outside the layers, in `dtype`.

        A GPU then holds the whole tensor, and returns rows in the checkpoint's dtype.
        """
        if self.device.type != "cuda":
            stored = self.checkpoint.read(name)
            rows = to_torch(Tensor(stored.dtype, stored.codes[part]), dtype)
            self.checkpoint.release()
            return rows.to(self.device)
        if name not in self._whole:
            self._whole |= self._wait([self._pool.submit(self._copy, name)])
        return self._whole[name][part]

    def of(self, checkpoint: Checkpoint) -> "LayerWeights":
        """Returns these weights if they are `checkpoint`'s; else frees them and returns its own."""
        if checkpoint == self.checkpoint:
            return self
        self.free()
        return LayerWeights(checkpoint, self.device, say=self._say)

    def run(self, compute: Callable[[], R]) -> R:
        """Returns `compute()`, which is repeated with fewer layers held if a GPU's memory is full.

        Raises ConfigError if none is held.
        """
        while True:
            try:
                return compute()
            except torch.OutOfMemoryError as error:
                reason = _reason(error)
            # What `compute` held is free here, as it is not while the error is handled.
            if not self._resident:
                raise ConfigError(
                    f"{reason}, though no weights are held there: stop what else uses the GPU, or"
                    " give --device cpu"
                )
            self.free()
            self._resident //= 2
            torch.cuda.empty_cache()
            self._say(f"the GPU's memory is full; {self}")

    def free(self) -> None:
        """Frees the memory of the layers that are held; they are read again when needed."""
        for futures in self._prefetched.values():
            self._wait(futures)
        for held in (self._held, self._whole, self._prefetched):
            held.clear()
        self._last = None

    def _stored(self, index: int, dtype: torch.dtype) -> Stored:
        return Stored(self.checkpoint, f"{self.checkpoint.spec.layer(index)}.", dtype)

    def _room(self) -> int:
        """Returns how many bytes layers may take."""
        if self.device.type != "cuda":
            return _CPU_BYTES
        _, total = torch.cuda.mem_get_info(self.device)
        spec = self.checkpoint.spec
        layer = 4 * self._values // spec.layers
        head = 4 * spec.vocab_size * spec.hidden_size
        free, least = free_memory(self.device), 2 * layer + head
        if free < least:
            raise ConfigError(
                f"{self.checkpoint.path}: the GPU has {_gb(free)} free, and a layer and the output"
                f" head take {_gb(least)}: stop what else uses the GPU, or give --device cpu"
            )
        others = min(_SHARE * total, _SHARE_BYTES) + _COPIES * layer + _HEADS * head
        return max(0, free - int(others))

    def _on_gpu(self, index: int) -> dict[str, torch.Tensor]:
        """Returns a layer in the checkpoint's dtypes; starts to read those that follow it."""
        held = self._held.get((index, None))
        if held is None and self._last is not None and self._last[0] == index:
            held = self._last[1]
        if held is None:
            self._begin(index)
            copied = self._wait(self._prefetched.pop(index))
            prefix = f"{self.checkpoint.spec.layer(index)}."
            held = assemble({name.removeprefix(prefix): x for name, x in copied.items()})
            if index < self._resident:
                self._held[index, None] = held
            else:
                self._last = (index, held)
        missing = (n for n in range(index + 1, len(self._sizes)) if (n, None) not in self._held)
        for following, _ in zip(missing, range(_AHEAD), strict=False):
            self._begin(following)
        return held

    def _begin(self, index: int) -> None:
        if index not in self._prefetched:
            names = self._names[index]
            self._prefetched[index] = [self._pool.submit(self._copy, name) for name in names]

    def _copy(self, name: str) -> _Copied:
        """Reads a tensor into pinned memory, and starts to copy it to the GPU."""
        dtype, shape = self.checkpoint.dtype(name), self.checkpoint.shape(name)
        pinned = empty_like_stored(dtype, shape, pin=True)
        self.checkpoint.read_into(name, pinned.reshape(-1).view(torch.uint8).numpy().data)
        with torch.cuda.stream(self._stream):
            copied = pinned.to(self.device, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        return name, copied, done

    def _wait(self, futures: Sequence[Future[_Copied]]) -> dict[str, torch.Tensor]:
        """Makes the current stream wait for copies; returns them by name."""
        stream = torch.cuda.current_stream(self.device)
        found = {}
        for name, copied, done in (future.result() for future in futures):
            stream.wait_event(done)
            copied.record_stream(stream)  # freed only when what reads it has run
            found[name] = copied
        return found


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
