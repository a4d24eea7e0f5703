"""Reads a checkpoint as an engine would: from its config.json and its safetensors files alone.

It is independent of the exporters: it knows neither recipe nor calibration, and decodes by its own
tables (verify/reader/codes.py), so it reads checkpoints of llm-compressor and ModelOpt as well.
One tensor is in memory at a time; `release` frees the pages of the mapped files.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from octet.errors import CheckpointError
from octet.storage.files import read_object
from octet.storage.tensors import Tensor, TensorFile
from verify.reader.codes import ELEMENTS, Elements, unpack, value_of
from verify.reader.dialects import quantization_of
from verify.reader.experts import one_by_one
from verify.reader.scheme import Quantization, Stored

__all__ = ["Coded", "Written", "is_checkpoint"]

Floats = NDArray[np.float32]
_MODELOPT = "hf_quant_config.json"
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Coded:
    """A weight as stored: real = values[codes] * scale.

    `codes` is uint8 [N, K], one code per element. `scale` is float32 and multiplies. `tile` is the
    number of rows and columns that share a scale; (N, K) if the whole tensor has one.
    """

    elements: Elements
    codes: NDArray[np.uint8]
    scale: Floats  # [⌈N/rows⌉, ⌈K/columns⌉], the product of both levels
    tile: tuple[int, int]
    whole: np.float32 | None = None  # the global scale as a multiplier, if any
    divides: bool = False  # the global scale is stored as a divisor

    def rows(self, start: int, stop: int) -> tuple[NDArray[np.uint8], Floats]:
        """Returns the codes [n, K] of those rows and their scales, which broadcast to [n, K]."""
        high, wide = self.tile
        codes = self.codes[start:stop]
        scale = self.scale
        if high > 1 and len(scale) > 1:
            scale = scale[start // high : -(-stop // high)].repeat(high, axis=0)
            first = start - start // high * high
            scale = scale[first : first + stop - start]
        elif len(scale) > 1:
            scale = scale[start:stop]
        if scale.shape[1] > 1:
            scale = scale.repeat(wide, axis=1)[:, : codes.shape[1]]
        return codes, scale

    def dequantized(self) -> Floats:
        """Returns the weight as float32 [N, K]."""
        real = np.empty(self.codes.shape, np.float32)
        for start, stop in slabs(self.codes.shape):
            codes, scale = self.rows(start, stop)
            np.multiply(self.elements.values[codes], scale, out=real[start:stop])
        return real


def slabs(shape: tuple[int, ...], elements: int = 1 << 17) -> Iterator[tuple[int, int]]:
    """Yields spans of rows with about that many elements."""
    step = max(1, elements // max(1, shape[1]))
    for start in range(0, shape[0], step):
        yield start, min(start + step, shape[0])


@dataclass(frozen=True)
class Written:
    """An opened checkpoint, quantized or not: the headers have been read, the tensors have not."""

    path: Path
    config: dict[str, Any]
    quantization: Quantization | None
    files: dict[str, TensorFile]  # tensor name, of each expert -> the file that holds it
    unlisted: tuple[str, ...]  # tensors in a shard that the index does not name
    lost: tuple[str, ...]  # tensors that the index names and no shard holds

    @classmethod
    def open(cls, path: Path) -> Self:
        """Reads the configuration and the headers.

        Raises CheckpointError if they cannot be read, UnsupportedError for an unknown format.
        """
        config = read_object(path / "config.json", CheckpointError)
        if "quantization_config" not in config and (path / _MODELOPT).is_file():
            other = read_object(path / _MODELOPT, CheckpointError)
            config = config | {"quantization_config": {"quant_method": "modelopt", **other}}
        listed: dict[str, str] = {}
        if (path / _INDEX).is_file():
            named = read_object(path / _INDEX, CheckpointError).get("weight_map")
            if not isinstance(named, dict) or not all(isinstance(x, str) for x in named.values()):
                raise CheckpointError(f"{path / _INDEX}: weight_map does not name files beside it")
            listed = named
            shards = sorted(set(listed.values()))
        elif (path / "model.safetensors").exists():
            shards = ["model.safetensors"]
        else:
            raise CheckpointError(f"{path}: no model.safetensors and no {_INDEX}")
        files: dict[str, TensorFile] = {}
        stored: list[str] = []
        for shard in shards:
            if Path(shard).name != shard:
                raise CheckpointError(f"{path / _INDEX}: {shard} is not beside it")
            file = TensorFile.open(path / shard)
            stored += file.names
            file = one_by_one(file)
            files |= dict.fromkeys(file.names, file)
        unlisted = tuple(name for name in stored if listed and name not in listed)
        lost = tuple(sorted(listed.keys() - set(stored)))
        found = quantization_of(config, str(path / "config.json"))
        return cls(path, config, found, files, unlisted, lost)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.files)

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def shape(self, name: str) -> tuple[int, ...]:
        return self.files[name].shape(name)

    def dtype(self, name: str) -> str:
        return self.files[name].dtype(name)

    def read(self, name: str) -> Tensor:
        return self.files[name].read(name)

    def values(self, name: str) -> Floats:
        """Returns a tensor as float32, whatever its stored dtype; U8 is E8M0."""
        tensor = self.read(name)
        return value_of("F8_E8M0" if tensor.dtype == "U8" else tensor.dtype, tensor.codes)

    def second_opinion(self) -> Quantization | None:
        """Parses ModelOpt's own file, which TensorRT-LLM reads; None if there is none."""
        if not (self.path / _MODELOPT).is_file():
            return None
        other = {"quant_method": "modelopt", **read_object(self.path / _MODELOPT, CheckpointError)}
        return quantization_of({"quantization_config": other}, str(self.path / _MODELOPT))

    def release(self) -> None:
        for file in set(self.files.values()):
            file.release()

    def coded(self, module: str, stored: Stored) -> Coded:
        """Returns the weight of a quantized linear.

        Raises KeyError or ValueError if its tensors do not fit.
        """
        packed = self.read(f"{module}.{stored.weight}").codes
        if packed.ndim != 2 or packed.dtype != np.uint8:
            raise ValueError(f"{module}.{stored.weight} is no matrix of codes")
        codes = unpack(packed) if stored.packed else packed
        scale = self.values(f"{module}.{stored.scale}")
        n, k = codes.shape
        if scale.shape not in stored.scale_shapes(n, k):
            raise ValueError(f"{module}.{stored.scale} has shape {list(scale.shape)}")
        if stored.granularity == "tensor":
            scale, tile = scale.reshape(1, 1), (n, k)
        elif stored.granularity == "channel":
            scale, tile = scale.reshape(n, 1), (1, k)
        else:
            assert stored.tile is not None
            tile = stored.tile
            scale = scale.reshape(-(-n // tile[0]), -(-k // tile[1]))
        elements = ELEMENTS[stored.elements]
        if stored.global_scale is None:
            return Coded(elements, codes, scale, tile)
        whole = self.values(f"{module}.{stored.global_scale}").reshape(-1)[0]
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            whole = np.float32(1) / whole if stored.divides else whole
            return Coded(elements, codes, scale * whole, tile, whole, stored.divides)

    def dequantized(self, module: str) -> Floats | None:
        """Returns the float32 [N, K] that an engine multiplies by; None if not quantized."""
        group = self.quantization.group_of(module) if self.quantization else None
        if group is None or f"{module}.{group.stored.weight}" not in self:
            return None
        return self.coded(module, group.stored).dequantized()


def is_checkpoint(path: Path) -> bool:
    single = path / "model.safetensors"
    return (path / "config.json").is_file() and (single.is_file() or (path / _INDEX).is_file())
