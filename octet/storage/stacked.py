"""Presents parts of a stacked tensor, such as the experts of a layer, as tensors of their own."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from octet.storage.tensors import Tensor, TensorFile

__all__ = ["Part", "StackedFile"]


@dataclass(frozen=True)
class Part:
    """Element `index` of the first dimension of the tensor `stored`, in `shape`.

    It is reshaped, or a matrix transposed, without changing a value.
    """

    stored: str
    index: int
    shape: tuple[int, ...]
    transposed: bool = False


class StackedFile(TensorFile):
    """A safetensors file in which `parts`, by name, stand for the tensors that hold them.

    `contents`, `span` and `scan` are those of the file itself.
    """

    def __init__(self, file: TensorFile, parts: Mapping[str, Part]) -> None:
        super().__init__(file.path, file._entries, file._buffer, file.metadata)
        self._parts = parts
        stacked = {part.stored for part in parts.values()}
        self._plain = tuple(name for name in file.names if name not in stacked)

    @property
    def names(self) -> tuple[str, ...]:
        return (*self._plain, *self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        part = self._parts.get(name)
        return super().shape(name) if part is None else part.shape

    def dtype(self, name: str) -> str:
        part = self._parts.get(name)
        return super().dtype(name if part is None else part.stored)

    def read(self, name: str) -> Tensor:
        """Returns the tensor, as a read-only view of the mapped file."""
        part = self._parts.get(name)
        if part is None:
            return super().read(name)
        stored = super().read(part.stored)
        own = stored.codes[part.index]
        return Tensor(stored.dtype, own.T if part.transposed else own.reshape(part.shape))

    def read_into(self, name: str, buffer: memoryview) -> None:
        """Reads the tensor's bytes, in row-major order, into `buffer` of their size."""
        if name in self._parts:
            codes = np.ascontiguousarray(self.read(name).codes)
            buffer[:] = codes.reshape(-1).view(np.uint8).data
        else:
            super().read_into(name, buffer)
