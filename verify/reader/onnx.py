"""Reads an ONNX export back: initializers by name, and the scales that the graph applies to them.

A weight is found under its checkpoint name. The attributes of the DequantizeLinear that reads it
define which elements share a scale, and its scale is followed back through Cast and
DequantizeLinear to initializers. Elements are decoded by verify/reader/codes.py.

TensorRT's form of a block scheme has codes [K/128, 128, N] and applies the scales to the partial
products: there `<weight>_scale` [K/128, 1, N] is found by name.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from octet.errors import ArtifactError
from octet.storage.tensors import Tensor
from verify.reader.checkpoint import Coded
from verify.reader.codes import ELEMENTS, bfloat16, e4m3, e8m0, unpack

__all__ = ["GraphWeight", "WrittenGraph"]

Floats = NDArray[np.float32]
BLOCK = 128
_CODES: dict[int, str] = {TensorProto.FLOAT8E4M3FN: "e4m3", TensorProto.FLOAT4E2M1: "e2m1"}
_TAGS: dict[int, str] = {
    TensorProto.FLOAT: "F32",
    TensorProto.FLOAT16: "F16",
    TensorProto.BFLOAT16: "BF16",
    TensorProto.FLOAT8E4M3FN: "F8_E4M3",
    TensorProto.FLOAT8E5M2: "F8_E5M2",
}
_RAW: dict[int, np.dtype[Any]] = {
    TensorProto.FLOAT: np.dtype("<f4"),
    TensorProto.FLOAT16: np.dtype("<f2"),
    TensorProto.BFLOAT16: np.dtype("<u2"),
    TensorProto.INT64: np.dtype("<i8"),
    TensorProto.INT32: np.dtype("<i4"),
    TensorProto.BOOL: np.dtype("?"),
}


@dataclass(frozen=True)
class GraphWeight:
    """A quantized weight, with the format and granularity of its scales."""

    coded: Coded
    scales: Literal["float32", "e8m0", "e4m3"]

    @property
    def label(self) -> str:
        rows, columns = self.coded.tile
        n, k = self.coded.codes.shape
        shared = "tensor" if (rows, columns) == (n, k) else f"{rows}x{columns}"
        shared = "row" if (rows, columns) == (1, k) else shared
        return f"{self.coded.elements.name} {self.scales} by {shared}"


class WrittenGraph:
    """The graph of `directory`: its structure is in memory, its weights stay in the file."""

    def __init__(self, directory: Path, model: onnx.ModelProto) -> None:
        self.directory = directory
        self.graph = model.graph
        self.opsets = model.opset_import
        self.initializers = {tensor.name: tensor for tensor in model.graph.initializer}
        self.maker = {name: node for node in model.graph.node for name in node.output}

    @classmethod
    def open(cls, directory: Path) -> Self:
        path = directory / "model.onnx"
        try:
            model = onnx.load(path, load_external_data=False)
        except Exception as error:  # protobuf's own classes share no base
            raise ArtifactError(f"{path}: cannot be read: {str(error).splitlines()[0]}") from None
        return cls(directory, model)

    @cached_property
    def readers(self) -> dict[str, list[onnx.NodeProto]]:
        found: dict[str, list[onnx.NodeProto]] = {}
        for node in self.graph.node:
            for name in node.input:
                found.setdefault(name, []).append(node)
        return found

    def leads_out(self, node: onnx.NodeProto) -> bool:
        """Decides whether an output of the graph depends on `node`; engines drop unused nodes."""
        return not self._live.isdisjoint(node.output)

    @cached_property
    def _live(self) -> set[str]:
        """Values that an output depends on."""
        found: set[str] = set()
        waiting = [value.name for value in self.graph.output]
        while waiting:
            name = waiting.pop()
            if name and name not in found:
                found.add(name)
                waiting.extend(self.maker[name].input if name in self.maker else ())
        return found

    def unread(self) -> Iterator[str]:
        """Yields inputs and initializers that no node reads."""
        for name in [value.name for value in self.graph.input] + [*self.initializers]:
            if name not in self.readers:
                yield name

    def tag(self, name: str) -> str:
        """Returns an initializer's safetensors dtype, or ONNX's name for it if there is none."""
        kind = self.initializers[name].data_type
        return _TAGS.get(kind, str(helper.tensor_dtype_to_string(kind)))

    def codes_of(self, name: str) -> str | None:
        """Returns the format of the codes that an initializer holds; None if it holds numbers."""
        return _CODES.get(self.initializers[name].data_type)

    def raw(self, name: str) -> NDArray[Any]:
        """Returns the content in its container dtype and shape; 4-bit codes are packed and flat."""
        tensor = self.initializers[name]
        dtype = _RAW.get(tensor.data_type, np.dtype("u1"))
        shape = tuple(tensor.dims)
        if tensor.data_location == TensorProto.EXTERNAL:
            where = {entry.key: entry.value for entry in tensor.external_data}
            count = int(where["length"]) // dtype.itemsize
            path = self.directory / where["location"]
            start = int(where.get("offset", 0))
            flat: NDArray[Any] = np.memmap(path, dtype, "r", start, (count,))
        else:
            flat = np.frombuffer(tensor.raw_data, dtype)
        if tensor.data_type == TensorProto.FLOAT4E2M1:
            return flat
        return flat.reshape(shape)

    def tensor(self, name: str) -> Tensor:
        return Tensor(self.tag(name), self.raw(name))

    def weight(self, name: str) -> GraphWeight:
        """Returns the quantized weight `name`, [N, K]; ValueError for an unknown structure."""
        reader = self._dequantizer(name)
        codes = self._codes(name)
        if codes.ndim == 3:  # TensorRT's blocks: [K/128, 128, N]
            groups, size, features = codes.shape
            scale = self.values(f"{name}_scale").reshape(groups, features).T
            codes = codes.reshape(groups * size, features).T
            tile = (1, size)
            if size == BLOCK and not (features % BLOCK) and _repeated(scale):
                scale, tile = scale[::BLOCK], (BLOCK, BLOCK)
            coded = self._coded(name, np.ascontiguousarray(codes), scale, tile)
            return GraphWeight(coded, "float32")
        scale = self.values(reader.input[1])
        attributes = {item.name: helper.get_attribute_value(item) for item in reader.attribute}
        n, k = codes.shape
        axis = int(attributes.get("axis", 1)) % 2
        size = int(attributes.get("block_size", 0))
        if "MXFP8" in reader.op_type:
            axis, size = 1, 32
        if scale.ndim == 0 or scale.size == 1:
            scale, tile = scale.reshape(1, 1), (n, k)
        elif scale.ndim == 1:
            tile = (1, k) if axis == 0 else (n, 1)
            scale = scale.reshape((-1, 1) if axis == 0 else (1, -1))
        elif size:
            tile = (size, 1) if axis == 0 else (1, size)
        else:
            raise ValueError(f"{name}: scales {list(scale.shape)} without block_size")
        wanted = (-(-n // tile[0]), -(-k // tile[1]))
        if scale.shape != wanted:
            raise ValueError(f"{name}: scales {list(scale.shape)}, should be {list(wanted)}")
        if tile == (1, BLOCK) and not (n % BLOCK) and _repeated(scale):
            scale, tile = scale[::BLOCK], (BLOCK, BLOCK)  # blocks, repeated for each row
        coded = self._coded(name, codes, scale, tile)
        return GraphWeight(replace(coded, whole=self._whole(reader)), self._scale_format(reader))

    def _coded(
        self, name: str, codes: NDArray[np.uint8], scale: Floats, tile: tuple[int, int]
    ) -> Coded:
        kind = self.codes_of(name)
        assert kind is not None
        return Coded(ELEMENTS[kind], codes, scale, tile)

    def _codes(self, name: str) -> NDArray[np.uint8]:
        flat = self.raw(name)
        if self.codes_of(name) != "e2m1":
            return flat
        shape = tuple(self.initializers[name].dims)
        return unpack(flat.reshape(*shape[:-1], shape[-1] // 2))

    def _dequantizer(self, name: str) -> onnx.NodeProto:
        for node in self.readers.get(name, []):
            if "DequantizeLinear" in node.op_type and node.input[0] == name:
                return node
        raise ValueError(f"{name}: no DequantizeLinear reads these codes")

    def _whole(self, reader: onnx.NodeProto) -> np.float32 | None:
        """Returns the global scale, if the scales are themselves dequantized."""
        node = self.maker.get(reader.input[1])
        if node is None or node.op_type != "DequantizeLinear":
            return None
        whole: np.float32 = self.values(node.input[1]).reshape(-1)[0]
        return whole

    def _scale_format(self, reader: onnx.NodeProto) -> Literal["float32", "e8m0", "e4m3"]:
        name = reader.input[1]
        while name not in self.initializers:
            name = self.maker[name].input[0]
        kind = self.initializers[name].data_type
        if kind == TensorProto.FLOAT8E4M3FN:
            return "e4m3"
        e8m0_kinds = (getattr(TensorProto, "FLOAT8E8M0", -1), TensorProto.UINT8)
        return "e8m0" if kind in e8m0_kinds else "float32"

    def values(self, name: str) -> Floats:
        """Returns a constant of the graph as float32: an initializer, or one behind Cast or DQ."""
        if name in self.initializers:
            kind, raw = self.initializers[name].data_type, self.raw(name)
            if kind == TensorProto.BFLOAT16:
                return bfloat16(raw)
            if kind == TensorProto.FLOAT8E4M3FN:
                return e4m3(raw)
            if raw.dtype == np.uint8:
                return e8m0(raw)
            return raw.astype(np.float32)
        node = self.maker.get(name)
        if node is None:
            raise ValueError(f"{name} is no constant")
        if node.op_type in ("Cast", "Identity"):
            return self.values(node.input[0])
        if node.op_type == "DequantizeLinear":
            product: Floats = self.values(node.input[0]) * self.values(node.input[1])
            return product
        raise ValueError(f"{name} comes from {node.op_type}, which is no scale")


def _repeated(scale: Floats) -> bool:
    """Decides whether all rows of each block of rows have the same scales."""
    blocks = scale.reshape(-1, BLOCK, scale.shape[1])
    return bool((blocks == blocks[:, :1]).all())
